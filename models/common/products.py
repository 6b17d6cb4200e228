"""Matrix products in the model's arithmetic, on whatever device the weights are.

Float32 weights: everything float32. Quantized and bf16 weights: the inputs of products with big (linear, absorbed)
matrices are rounded to bf16, so are attention's queries and the inputs of a bf16 head; sums are float32; the router and
the index weights, whose results decide something, see float32 inputs. The scale of a `Normed` input is applied to the
product, so that what is rounded is x * weight. Kernels round at the same places.

With FP8 activations the rounded inputs of quantized matrices are quantized too, per 128 (FP8 weights) or 32 (MXFP4).
With f32 activations nothing is rounded: what the other two are judged by.

A CPU does this in float32 with rounded inputs. A GPU uses its bf16 matrix units with float32 sums; FP8 weights become
bf16 there, float32 inputs are split in two bf16 halves, and attention's probabilities are rounded to bf16 too.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from rocmega.models.common.formulas import Normed, float32_matmul, fp8_activations, mxfp8_activations

Input = torch.Tensor | Normed  # [..., k]


class Formats(Protocol):
    """What a family says of its formats: those of the big matrices and of the islands."""

    @property
    def linear(self) -> str: ...

    @property
    def island(self) -> str: ...


class Products:
    """The products a model with these formats needs on this device.

    activations: "bf16", "fp8" or "f32". matrix_units: whether bf16 matrix units may be used, by default where there are
    any and the activations allow it; without them products round the same inputs and are float32 otherwise.

    Fields:
        rounded: inputs of linear and absorbed products, and attention's queries, are rounded to bf16.
        rounded_head: inputs of the head are.
        fast: bf16 matrix units are used.
        weight_dtype: what dequantized matrices are wanted in.
        narrow: activations that meet quantized matrices are FP8.
    """

    def __init__(
        self,
        formats: Formats,
        device: torch.device,
        activations: str = "bf16",
        matrix_units: bool | None = None,
    ):
        exact, self.narrow = activations == "f32", activations == "fp8"
        self.rounded, self.rounded_head = formats.linear != "f32" and not exact, formats.island == "bf16" and not exact
        possible = self.rounded and device.type != "cpu" and not self.narrow
        self.fast = possible if matrix_units is None else possible and matrix_units
        self.weight_dtype = torch.bfloat16 if self.fast else torch.float32
        self._wide_sums = self.fast and _has_wide_sums(device)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """The values that a product with a linear or absorbed matrix, or with cached keys, sees, float32."""
        return x.to(torch.bfloat16).to(torch.float32) if self.rounded else x

    def linear(self, x: Input, weight: torch.Tensor, format: str = "bf16") -> torch.Tensor:
        """X [..., k] times a linear matrix [n, k] that is stored in `format`: float32 [..., n]."""
        if isinstance(x, Normed):
            return self.linear(x.values, weight, format) * x.scale
        if self.fast:
            return self._bf16(x.flatten(0, -2).to(torch.bfloat16), weight.mT).unflatten(0, x.shape[:-1])
        return F.linear(self._input(x, format), weight)

    def each(self, x: Input, weight: torch.Tensor, format: str = "bf16") -> torch.Tensor:
        """As `linear`, every row of x [rows, k] with a matrix of its own, weight [rows, n, k]: float32 [rows, n]."""
        if isinstance(x, Normed):
            return self.each(x.values, weight, format) * x.scale
        return self._batched(x[:, None], weight, format)[:, 0]

    def heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """X [..., heads, k] times absorbed matrices [heads, n, k]: float32 [..., heads, n]."""
        by_head = x.flatten(0, -3).transpose(0, 1)
        out = self._batched(by_head, weight, "bf16")
        return out.transpose(0, 1).unflatten(0, x.shape[:-2])

    def head(self, x: Input, weight: torch.Tensor) -> torch.Tensor:
        """X [..., k] times the head [n, k], in its own dtype if `fast`: float32 [..., n]."""
        if isinstance(x, Normed):
            return self.head(x.values, weight) * x.scale
        if not self.rounded_head:
            return self.island(x, weight)
        return self.linear(x.to(torch.bfloat16).to(torch.float32), weight)

    def island(self, x: Input, weight: torch.Tensor) -> torch.Tensor:
        """X [..., k], float32, times an island [n, k], in its own dtype if `fast`: float32 [..., n]."""
        if isinstance(x, Normed):
            return self.island(x.values, weight) * x.scale
        if not self.fast or weight.dtype == torch.float32:
            return F.linear(x, weight.to(torch.float32))
        rows = x.flatten(0, -2)
        high = rows.to(torch.bfloat16)
        low = (rows - high).to(torch.bfloat16)
        return (self._bf16(high, weight.mT) + self._bf16(low, weight.mT)).unflatten(0, x.shape[:-1])

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """A @ b, [n, m, k] and [n, k, l], for attention: float32 [n, m, l]."""
        if self.fast:
            return self._bf16(a.to(torch.bfloat16), b.to(torch.bfloat16))
        return float32_matmul(a, b)

    def _input(self, x: torch.Tensor, format: str) -> torch.Tensor:
        """What a linear matrix that is stored in `format` sees of x [..., k]."""
        x = self.round(x)
        if self.narrow and format.startswith("fp8"):
            return fp8_activations(x)
        if self.narrow and format == "mxfp4":
            return mxfp8_activations(x)
        return x

    def _batched(self, x: torch.Tensor, weight: torch.Tensor, format: str) -> torch.Tensor:
        """X [batch, m, k] with weight [batch, n, k], stored in `format`: float32 [batch, m, n]."""
        return self._bf16(x.to(torch.bfloat16), weight.mT) if self.fast else self._input(x, format) @ weight.mT

    def _bf16(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not self._wide_sums:
            return a.to(torch.float32) @ b.to(torch.float32)
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)


def _has_wide_sums(device: torch.device) -> bool:
    """Whether this torch multiplies bf16 matrices into float32 here."""
    sample = torch.zeros(1, 16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.bmm(sample, sample, out_dtype=torch.float32)
        torch.mm(sample[0], sample[0], out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True
