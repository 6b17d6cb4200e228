"""What a decode step of DeepSeek chose: experts, compressed entries, and candidates that later choices are bound to.

See models/common/choices.py for what it is good for. Experts that a table chooses by the token are no choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rocmega.models.common.choices import Numbers
from rocmega.models.common.formulas import inverse_rms, route
from rocmega.models.common.kernel import ROWS, router_slices
from rocmega.models.deepseek.formulas import router_scores

if TYPE_CHECKING:
    from rocmega.models.deepseek.compress import Selection
    from rocmega.models.deepseek.mega import MegaPath
    from rocmega.models.deepseek.stages import LayerStages


@dataclass
class Picks:
    """Of a step with a token a row.

    Fields:
        experts: of each layer whose router chooses, int64 [rows, topk], ascending.
        entries: of each layer that selects, which entries; None where nothing was left out.
        candidates: of the layer that chooses them, which blocks of entries; None likewise. Empty if no layer does.
    """

    experts: list[torch.Tensor] = field(default_factory=list)
    entries: list[Numbers | None] = field(default_factory=list)
    candidates: list[Numbers | None] = field(default_factory=list)

    def read(self) -> Picks:
        """A copy, which a graph's next replay does not write into."""
        entries, candidates = (
            [None if each is None else (each[0].clone(), each[1].clone()) for each in of]
            for of in (self.entries, self.candidates)
        )
        return Picks([each.clone() for each in self.experts], entries, candidates)

    def add(self, layer: LayerStages, selection: Selection, experts: torch.Tensor) -> None:
        """The next layer's, of the standard path."""
        if layer.selects:
            self.entries.append(_of_step(selection.chosen()))
        if layer.chooses_candidates:
            self.candidates.append(_of_step(selection.candidates()))
        if not layer.hashed:
            self.experts.append(experts)


def _of_step(numbers: Numbers | None) -> Numbers | None:
    """[rows, 1, K] without the tokens, of which there is one."""
    return None if numbers is None else (numbers[0][:, 0], numbers[1][:, 0])


def picks_of(mega: MegaPath) -> Picks:
    """Runs the step that was placed, and reads what it chose. `mega` has a launch for each layer: the same bits."""
    c, picks = mega.config, Picks()
    for layer in mega.launches():
        kind = c.compressed[layer]
        if c.selects(layer):
            assert kind is not None
            picks.entries.append(_mega_entries(mega, (mega.positions + 1) // kind.ratio))
        if c.candidates is not None and layer == c.candidates.source:
            assert kind is not None
            picks.candidates.append(_mega_candidates(mega, (mega.positions + 1) // kind.ratio))
        if not c.hash_layers[layer]:
            picks.experts.append(_mega_experts(mega, layer))
    mega.result()
    return picks


def _mega_entries(mega: MegaPath, made: torch.Tensor) -> Numbers | None:
    """made: entries of each row. Rows that have no more than a selection attend to everything."""
    topk, made = mega.config.index_topk, made.long()[:, None]
    if int(made.max()) <= topk:
        return None
    everything = torch.arange(topk, device=made.device).expand(len(made), -1)
    selected = mega.region("selection", torch.int32).view(ROWS, topk)[: len(made)].long()
    return torch.where(made <= topk, everything, selected), everything < made


def _mega_candidates(mega: MegaPath, made: torch.Tensor) -> Numbers | None:
    """The kernel leaves a word for each block, of rows that are bound."""
    bound = mega.config.candidates
    assert bound is not None
    blocks = -(-made.long()[:, None] // bound.block_size)
    if int(made.max()) <= mega.config.index_topk or int(blocks.max()) <= bound.blocks:
        return None
    taken = mega.region("candidates_taken", torch.int32).view(ROWS, -1)[: len(made), : int(blocks.max())]
    numbers = torch.arange(taken.shape[1], device=made.device)
    chosen = torch.where(blocks <= bound.blocks, numbers < blocks, (taken == 1) & (numbers < blocks))
    order = (~chosen).to(torch.int8).sort(dim=1, stable=True).indices[:, : bound.blocks]
    return order, chosen.gather(1, order)


def _mega_experts(mega: MegaPath, layer: int) -> torch.Tensor:
    """As the kernel does it: from its router's products in slices of k, and its input's norm."""
    c, rows = mega.config, len(mega.positions)

    def values(region: str, slot: int, parts: int) -> torch.Tensor:
        pairs = mega.region(region, torch.float32).view(2, ROWS, parts, -1, 2)
        return pairs[slot % 2, :rows, ..., 0]

    products = values("router_scores", layer, router_slices(c.hidden_size)).sum(1)
    scale = inverse_rms(values("x", 1, 1).squeeze(1), c.rms_norm_eps)
    bias = mega.weights.layers[layer]["router_bias"]
    assert isinstance(bias, torch.Tensor)
    return route(router_scores(products * scale), bias, c.num_experts_per_tok, c.routed_scaling_factor)[0]
