"""GLM's mathematics without weights: the float32 formulas of a decode step.

What other families have too is in models/common/formulas.py. These functions are what the kernels' stages are tested
against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rocmega.models.common.formulas import Normed as Normed
from rocmega.models.common.formulas import attention as attention
from rocmega.models.common.formulas import attention_partial as attention_partial
from rocmega.models.common.formulas import deferred_rms_norm as deferred_rms_norm
from rocmega.models.common.formulas import float32_matmul as float32_matmul
from rocmega.models.common.formulas import fp8_activations as fp8_activations
from rocmega.models.common.formulas import index_scores as index_scores
from rocmega.models.common.formulas import inverse_rms as inverse_rms
from rocmega.models.common.formulas import merge_partials as merge_partials
from rocmega.models.common.formulas import mxfp8_activations as mxfp8_activations
from rocmega.models.common.formulas import pair_angles, rope_adjacent
from rocmega.models.common.formulas import rms_norm as rms_norm
from rocmega.models.common.formulas import route as route
from rocmega.models.common.formulas import select as select


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rope_angles(positions: torch.Tensor, theta: float, dim: int) -> torch.Tensor:
    """Cosine and sine of each channel pair's angle: float32 [..., dim / 2, 2] for integer positions [...].

    Pair i turns by theta^(-2i / dim) per position. With positions 0, 1, 2, ... this is the kernels' `rope` table.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    return pair_angles(positions, 1.0 / theta**exponents)


def rope_leading(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates the first channels of x [..., width], as many as the angles are for; the rest stays."""
    dim = 2 * angles.shape[-2]
    return torch.cat([rope_adjacent(x[..., :dim], angles), x[..., dim:]], dim=-1)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up
