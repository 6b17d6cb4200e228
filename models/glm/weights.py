"""The packed weights that kernels and the standard path share, and how they come into memory.

Field names and shapes are those of LayerWeights in descriptor.h. They are made from a checkpoint (`pack`) or are those
of a pack that lies on disk already (`assemble`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.models.common.published import Expected as Expected
from rocmega.models.common.weights import Layer as Layer
from rocmega.models.common.weights import Progress, by_layer, carry_out, is_of, tensors_of
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.plan import draft_plan, plan
from rocmega.models.glm.published import Formats as Formats
from rocmega.models.glm.published import check as check
from rocmega.models.glm.published import check_part, draft_tensors, has_draft_layer
from rocmega.models.glm.published import expected_tensors as expected_tensors
from rocmega.models.glm.published import layer_tensors as layer_tensors
from rocmega.models.glm.published import named_formats as named_formats
from rocmega.models.glm.published import published_formats as published_formats
from rocmega.models.glm.published import scale_name as scale_name
from rocmega.packing.plan import Plan

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint


@dataclass(frozen=True)
class GlmWeights:
    """A model's packed weights, or one rank's part of them.

    Fields:
        formats: of matrices and cache.
        layers: per layer, field of LayerWeights -> PackedMatrix, or float32 tensor for norms and biases. Fields that
        are null
            in descriptor.h are absent. gate_up and down of mixture layers hold the shared expert last.
        embedding: island dtype [vocab, hidden], row-major.
        final_norm: float32 [hidden].
        head: [vocab, hidden], island format.
        tp, rank: how many ranks share the model, and whose part this is.
    """

    formats: Formats
    layers: list[Layer]
    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: PackedMatrix
    tp: int = 1
    rank: int = 0

    @property
    def section(self) -> range:
        """The layers that are here: a node's, or all. Of the others `layers` holds nothing."""
        here = [number for number, layer in enumerate(self.layers) if layer]
        return range(here[0], here[-1] + 1)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the packed copy."""
        yield from tensors_of((self.embedding, self.final_norm, self.head))
        for layer in self.layers:
            yield from tensors_of(layer.values())

    def bytes(self) -> int:
        """Device bytes of the packed copy."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device


def plan_of(
    checkpoint: Checkpoint, config: GlmConfig, *, tp: int = 1, arch: str | None = None, activations: str = "auto"
) -> Plan:
    """The plan to pack a checkpoint. Raises CheckpointError if it does not fit its config.json, ConfigError as plan."""
    return plan(config, check(checkpoint, config), tp=tp, arch=arch, activations=activations)


def pack_plan(checkpoint: Checkpoint, config: GlmConfig, *, tp: int = 1, arch: str | None = None) -> Plan:
    """What a pack on disk holds: for one rank, a layer for guessing ahead too, if the checkpoint has one.

    That layer runs on one rank alone, so packs for several have no use for it. Raises as `plan_of`.
    """
    model = plan_of(checkpoint, config, tp=tp, arch=arch)
    if tp > 1 or not has_draft_layer(checkpoint, config):
        return model
    draft = draft_plan(config, check_part(checkpoint, config, draft_tensors(config)), arch=arch)
    return replace(model, fields={**model.fields, **draft.fields}, jobs=[*model.jobs, *draft.jobs])


def pack(
    checkpoint: Checkpoint,
    config: GlmConfig,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    *,
    tp: int = 1,
    rank: int = 0,
    arch: str | None = None,
    activations: str = "auto",
    section: range | None = None,
) -> GlmWeights:
    """Reads and packs all weights, or one rank's part. Nothing is packed if the checkpoint does not fit.

    progress: called with (layers done, layers) after each layer. tp, arch, activations: see `plan`. section: a node's
    layers; embedding and head come with any. Raises CheckpointError, or ConfigError if the ranks cannot share the
    model.
    """
    todo = plan_of(checkpoint, config, tp=tp, arch=arch, activations=activations)
    todo = replace(todo, jobs=[job for job in todo.jobs if is_of(job.field, section)])
    fields = carry_out(checkpoint, todo, config.num_hidden_layers, progress, device, rank)
    return assemble(todo.formats, config, fields, tp, rank)


def assemble(
    formats: Mapping[str, str],
    config: GlmConfig,
    fields: Mapping[str, PackedMatrix | torch.Tensor],
    tp: int = 1,
    rank: int = 0,
) -> GlmWeights:
    """A model's weights from the fields of its plan or pack."""
    embedding, final_norm, head = fields["embedding"], fields["final_norm"], fields["head"]
    assert isinstance(embedding, torch.Tensor)
    assert isinstance(final_norm, torch.Tensor)
    assert isinstance(head, PackedMatrix)
    layers = by_layer(fields, config.num_hidden_layers)
    return GlmWeights(Formats(**formats), layers, embedding, final_norm, head, tp, rank)
