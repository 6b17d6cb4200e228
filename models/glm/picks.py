"""What a decode step chose: experts, and the positions that attention reads.

Where two experts or positions are nearly equal, rounding decides, and the step of another choice is another step, not a
less exact one. So paths are compared on equal choices (following.py), and choices by the scores they were made from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rocmega.cache import PAGE
from rocmega.models.common.choices import Numbers
from rocmega.models.common.formulas import inverse_rms, route
from rocmega.models.glm import kernel

if TYPE_CHECKING:
    from rocmega.models.glm.mega import MegaPath
    from rocmega.models.glm.standard import Selection


@dataclass
class Picks:
    """Of a step with a token a row.

    Fields:
        experts: of each mixture layer, int64 [rows, topk], ascending.
        positions: of each layer with an indexer, int64 [rows, K], ascending, and which of them count, bool [rows, K];
            None where nothing was left out.
    """

    experts: list[torch.Tensor] = field(default_factory=list)
    positions: list[Numbers | None] = field(default_factory=list)

    def read(self) -> Picks:
        """A copy, which a graph's next replay does not write into."""
        return Picks(
            [each.clone() for each in self.experts],
            [None if each is None else (each[0].clone(), each[1].clone()) for each in self.positions],
        )

    def add(self, full_index: bool, selection: Selection | None, experts: torch.Tensor | None) -> None:
        """The next layer's, of the standard path."""
        if full_index:
            self.positions.append(None if selection is None else (selection.positions[:, 0], selection.valid[:, 0]))
        if experts is not None:
            self.experts.append(experts)


def positions_of_slots(slots: torch.Tensor, table: torch.Tensor, counts: torch.Tensor) -> Numbers:
    """Positions of cache slots [rows, K], of which each row's first `counts` [rows] count; table: pages [rows, P]."""
    valid = torch.arange(slots.shape[1], device=slots.device) < counts[:, None]
    page = (table[:, None, :] == (slots // PAGE)[:, :, None]).int().argmax(-1)
    return page * PAGE + slots.long() % PAGE, valid


def picks_of(mega: MegaPath) -> Picks:
    """Runs the step that was placed, and reads what it chose. `mega` has a launch for each layer: the same bits."""
    c, picks = mega.config, Picks()
    for layer in mega.launches():
        if c.full_index[layer]:
            picks.positions.append(_mega_positions(mega))
        if not c.dense_layers[layer]:
            picks.experts.append(_mega_experts(mega, layer))
    mega.result()
    return picks


def _mega_positions(mega: MegaPath) -> Numbers | None:
    """Rows as long as the selection or shorter have none: they attend to everything."""
    at, topk = mega.positions.long()[:, None], mega.config.index_topk
    if int(at.max()) < topk:
        return None
    everything = torch.arange(topk, device=at.device).expand(len(at), -1)
    selected = mega.region("selection", torch.int32).view(kernel.ROWS, topk)[: len(at)].long()
    return torch.where(at < topk, everything, selected), everything <= at


def _mega_experts(mega: MegaPath, layer: int) -> torch.Tensor:
    """As the kernel does it: from its router's products in slices of k, and the residual stream's norm."""
    c, rows = mega.config, len(mega.positions)

    def values(region: str, slot: int, parts: int) -> torch.Tensor:
        pairs = mega.region(region, torch.float32).view(2, kernel.ROWS, parts, -1, 2)
        return pairs[slot % 2, :rows, ..., 0]

    slices = kernel.router_slices(c.hidden_size)
    products = values("router_scores", layer, slices)[..., : c.n_routed_experts].sum(1)
    scale = inverse_rms(values("x", 2 * layer + 1, 1).squeeze(1), c.rms_norm_eps)
    bias = mega.weights.layers[layer]["router_bias"]
    assert isinstance(bias, torch.Tensor)
    return route((products * scale).sigmoid(), bias, c.num_experts_per_tok, c.routed_scaling_factor)[0]
