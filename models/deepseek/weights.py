"""The packed weights that kernels and the standard path share, and how they come into memory.

They are made from a checkpoint (`pack`) or are those of a pack that lies on disk already (`assemble`). Field names are
those of plan.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.models.common.published import Expected as Expected
from rocmega.models.common.weights import Layer, Progress, Value, by_layer, carry_out, tensors_of
from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.engram import Table
from rocmega.models.deepseek.plan import plan
from rocmega.models.deepseek.published import Formats as Formats
from rocmega.models.deepseek.published import check as check
from rocmega.models.deepseek.published import expected_tensors as expected_tensors
from rocmega.models.deepseek.published import named_formats as named_formats
from rocmega.models.deepseek.published import published_formats as published_formats
from rocmega.packing.plan import Plan

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint


@dataclass(frozen=True)
class DeepseekWeights:
    """A model's packed weights, or one rank's part of them.

    Fields:
        formats: of matrices and cache.
        layers: per layer, field -> PackedMatrix or tensor. Fields that a layer does not have are absent. gate_up holds
            w1 and w3 of each routed expert in turn.
        embedding: island dtype [vocab, hidden], row-major.
        final_norm: float32 [hidden].
        head: [vocab, hidden], island format.
        end: end_mix float32 [S, S * hidden], end_mix_base [S] and end_mix_scale [1], which collapse the streams after
            the last layer; empty in delayed models.
        tables: layer -> Engram's table; token_map int32 [vocab], token -> compressed id, None without Engram.
        tp, rank: how many ranks share the model, and whose part this is.
    """

    formats: Formats
    layers: list[Layer]
    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: PackedMatrix
    end: Layer = field(default_factory=dict)
    tables: dict[int, Table] = field(default_factory=dict)
    token_map: torch.Tensor | None = None
    tp: int = 1
    rank: int = 0

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the packed copy, those in host memory too."""
        yield from tensors_of((self.embedding, self.final_norm, self.head, *self.end.values()))
        for layer in self.layers:
            yield from tensors_of(layer.values())
        if self.token_map is not None:
            yield self.token_map

    def bytes(self) -> int:
        """Bytes of the packed copy."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def compressed_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Engram's ids, int64, of tokens of any shape, in host memory."""
        assert self.token_map is not None
        return self.token_map[tokens.to(self.token_map.device)].long()


def plan_of(
    checkpoint: Checkpoint, config: DeepseekConfig, *, tp: int = 1, arch: str | None = None, activations: str = "auto"
) -> Plan:
    """The plan to pack a checkpoint. Raises CheckpointError if it does not fit its config.json, ConfigError as plan."""
    return plan(config, check(checkpoint, config), tp=tp, arch=arch, activations=activations)


def pack_plan(checkpoint: Checkpoint, config: DeepseekConfig, *, tp: int = 1, arch: str | None = None) -> Plan:
    """What a pack on disk holds. Raises as `plan_of`."""
    return plan_of(checkpoint, config, tp=tp, arch=arch)


def pack(
    checkpoint: Checkpoint,
    config: DeepseekConfig,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    *,
    tp: int = 1,
    rank: int = 0,
    arch: str | None = None,
    activations: str = "auto",
) -> DeepseekWeights:
    """Reads and packs all weights, or one rank's part. Nothing is packed if the checkpoint does not fit.

    progress: called with (layers done, layers) after each layer. tp, arch, activations: see `plan`. Raises
    CheckpointError, or ConfigError if the ranks cannot share the model.
    """
    todo = plan_of(checkpoint, config, tp=tp, arch=arch, activations=activations)
    fields = carry_out(checkpoint, todo, config.num_hidden_layers, progress, device, rank)
    return assemble(todo.formats, config, fields, tp, rank)


def assemble(
    formats: Mapping[str, str],
    config: DeepseekConfig,
    fields: Mapping[str, Value],
    tp: int = 1,
    rank: int = 0,
) -> DeepseekWeights:
    """A model's weights from the fields of its plan or pack."""
    layers = by_layer(fields, config.num_hidden_layers)
    embedding, final_norm, head = fields["embedding"], fields["final_norm"], fields["head"]
    assert isinstance(embedding, torch.Tensor)
    assert isinstance(final_norm, torch.Tensor)
    assert isinstance(head, PackedMatrix)
    end = {name: value for name, value in fields.items() if name.startswith("end_mix")}
    token_map = fields.get("token_map")
    assert token_map is None or isinstance(token_map, torch.Tensor)
    tables = {layer: _table(config, layer, layers[layer]) for layer in (config.engram.layers if config.engram else ())}
    of = Formats(**formats)
    return DeepseekWeights(of, layers, embedding, final_norm, head, end, tables, token_map, tp, rank)


def _table(config: DeepseekConfig, layer: int, fields: Layer) -> Table:
    rows, scales = fields.get("engram_rows", fields.get("engram_codes")), fields.get("engram_scales")
    assert config.engram is not None
    assert isinstance(rows, torch.Tensor)
    assert scales is None or isinstance(scales, torch.Tensor)
    return Table(config.engram, layer, rows, scales)
