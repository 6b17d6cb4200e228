"""A layer's packed weights as stages use them: what every family does alike."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.models.common.formulas import Normed
from rocmega.models.common.products import Input, Products
from rocmega.models.common.weights import Layer

# Rows times experts that are gathered: of more, sorting them by expert reads fewer bytes.
_GATHERED = 128
# One expert's output [tokens, hidden] of inputs [tokens, hidden], its index, and weights [tokens, 1].
Expert = Callable[[Normed, int, torch.Tensor], torch.Tensor]
Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of two products [..., width], what `down` sees


class PackedLayer:
    """A layer's packed weights, and products with them.

    Fields:
        resident: dequantized matrices are kept once they are made; else they are made anew for each use.
    """

    def __init__(self, fields: Layer, products: Products, resident: bool):
        self.fields, self.products, self.resident = fields, products, resident
        self._kept: dict[tuple[str, int | None], torch.Tensor] = {}

    def matrix(self, field: str, index: int | None = None) -> torch.Tensor:
        """A field's values [n, k] (or [count, n, k] of several), or those of its matrix `index` alone."""
        kept = self._kept.get((field, index))
        if kept is not None:
            return kept
        packed = self.fields[field]
        assert isinstance(packed, PackedMatrix)
        values = (packed if index is None else packed.matrix(index)).dequantize(self.products.weight_dtype)
        if self.resident:
            self._kept[field, index] = values
        return values

    def linear(self, x: Input, field: str, index: int | None = None) -> torch.Tensor:
        """X [..., k] times a linear field's matrix [n, k], or its matrix `index`: float32 [..., n]."""
        packed = self.fields[field]
        assert isinstance(packed, PackedMatrix)
        return self.products.linear(x, self.matrix(field, index), packed.format)

    def each(self, x: Input, field: str, indices: torch.Tensor) -> torch.Tensor:
        """Row i of x [rows, k] times the linear field's matrix indices[i]: float32 [rows, n]."""
        packed = self.fields[field]
        assert isinstance(packed, PackedMatrix)
        weight = packed.gather(indices).dequantize(self.products.weight_dtype)
        return self.products.each(x, weight.view(-1, packed.n, packed.k), packed.format)

    def gathers(self, experts: torch.Tensor) -> bool:
        """Whether so few experts [tokens, topk] are better run by `gathered` than by `routed`."""
        return not self.resident and experts.numel() <= _GATHERED

    def gathered(self, gate: Gate, y: Normed, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`routed` with a matrix for each token's choice: nothing comes back to the host, so a graph can hold it."""
        tokens, topk = experts.shape
        inputs = y[torch.arange(tokens * topk, device=experts.device) // topk]
        chosen, factors = experts.flatten(), weights.flatten()[:, None]
        middle = gate(*(self.each(inputs, "gate_up", 2 * chosen + part) for part in (0, 1)))
        return self.each(middle * factors, "down", chosen).unflatten(0, (tokens, topk)).sum(1)

    def vector(self, field: str) -> torch.Tensor:
        """A norm's weight or a bias, float32."""
        values = self.fields[field]
        assert isinstance(values, torch.Tensor)
        return values


def routed(expert: Expert, count: int, y: Normed, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of each token's routed experts, summed by ascending expert: [T, hidden] for y [T, hidden].

    experts int64 [T, topk], ascending, of `count`; weights float32 [T, topk].
    """
    topk = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # token-expert pairs, grouped by expert
    inputs, factors = y[order // topk], weights.flatten()[order, None]
    outputs = torch.empty_like(inputs.values)
    counts = torch.bincount(experts.flatten(), minlength=count).tolist()
    end = 0
    for index, count in enumerate(counts):
        if count:
            start, end = end, end + count
            outputs[start:end] = expert(inputs[start:end], index, factors[start:end])
    by_pair = torch.empty_like(outputs)
    by_pair[order] = outputs
    return by_pair.unflatten(0, (-1, topk)).sum(1)
