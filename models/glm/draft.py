"""GLM's layer for guessing ahead (multi-token prediction), in PyTorch.

Published as one more layer after the model's own, `model.layers.N` with N = num_hidden_layers: a mixture layer with an
indexer, and what joins its two inputs. At position p it sees the token of position p + 1 and what the model left at p:

    x = eh_proj [rms(embed(token p + 1), enorm), rms(final norm of the residual stream at p, hnorm)]
    logits of token p + 2 = lm_head rms(layer(x), shared_head.norm)

For a token more, the layer goes on from its own output in place of the model's, one position later. (The model's own is
passed through its final norm first, the layer's own is not: as vLLM does, and what is published does not say. It
changes what is guessed, never what is answered.) Embedding and head are the model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rocmega.cache import PagedCache
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.errors import CheckpointError
from rocmega.models.common.formulas import rms_norm
from rocmega.models.common.weights import Layer, Value, carry_out
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.plan import draft_plan
from rocmega.models.glm.published import Formats, check_part, draft_tensors, has_draft_layer
from rocmega.models.glm.standard import StandardPath
from rocmega.models.glm.weights import GlmWeights
from rocmega.packing.plan import DRAFT

if TYPE_CHECKING:
    from rocmega.cache import Memory
    from rocmega.checkpoint import Checkpoint
    from rocmega.packing import Pack


@dataclass(frozen=True)
class DraftWeights:
    """The layer's packed weights: as LayerWeights of descriptor.h, with `eh_proj`, and norms."""

    formats: Formats
    layer: Layer


def load(
    checkpoint: Checkpoint, config: GlmConfig, device: torch.device | str = "cpu", activations: str = "bf16"
) -> DraftWeights:
    """Reads and packs the layer. Raises CheckpointError if the checkpoint has none, or not all of it."""
    if not has_draft_layer(checkpoint, config):
        raise _lacking(checkpoint.directory, config)
    stored = check_part(checkpoint, config, draft_tensors(config))
    todo = draft_plan(config, stored, activations=activations)
    return _weights(carry_out(checkpoint, todo, 0, None, device, 0))


def load_packed(pack: Pack, config: GlmConfig, device: torch.device | str = "cpu") -> DraftWeights:
    """The layer of a pack. Raises CheckpointError if it holds none."""
    fields = pack.load(device, wanted=lambda field: field.startswith(DRAFT))
    if not fields:
        raise _lacking(pack.directory, config)
    return _weights(fields)


def _lacking(directory: Path, config: GlmConfig) -> CheckpointError:
    return CheckpointError(
        f"{directory} has no layer for guessing ahead (num_nextn_predict_layers in config.json, tensors "
        f"model.layers.{config.num_hidden_layers}.* of a checkpoint, {DRAFT}* of a pack for one rank): take "
        "draft_method='lookup', or a checkpoint that has one, or pack that again."
    )


def _weights(fields: Mapping[str, Value]) -> DraftWeights:
    layer = {name.removeprefix(DRAFT): value for name, value in fields.items()}
    stored = {name: value.format for name, value in layer.items() if isinstance(value, PackedMatrix)}
    formats = Formats(stored["q_a"], stored["eh_proj"], expert=stored["gate_up"], absorbed=stored["key_up"])
    return DraftWeights(formats, layer)


class DraftPath(StandardPath):
    """The layer over a cache of its own, which has the model's pages: the same block tables serve both.

    main: the model's path, whose embedding and head it shares. memory: where the cache is made.
    """

    def __init__(self, main: StandardPath, weights: DraftWeights, memory: Memory):
        config = dataclasses.replace(main.config, num_hidden_layers=1, dense_layers=(False,), full_index=(True,))
        own = weights.layer
        shared = GlmWeights(
            weights.formats, [own], main.weights.embedding, _vector(own, "head_norm"), main.weights.head
        )
        cache = PagedCache(config.cache_spec(weights.formats.cache), main.cache.pages, memory)
        exact = weights.formats.absorbed == "f32"
        super().__init__(config, shared, cache, activations="f32" if exact else "bf16")
        self.main = main
        self._embed_norm, self._hidden_norm = _vector(own, "embed_norm"), _vector(own, "hidden_norm")

    @torch.no_grad()
    def prefill_draft(
        self, following: torch.Tensor, residual: torch.Tensor, position0: int, block_table: torch.Tensor
    ) -> torch.Tensor:
        """Caches a prompt's positions position0, position0 + 1, ...; returns the layer's output of the last, [hidden].

        following: integers [n], at each position the token of the next. residual: float32 [n, hidden], what the model's
        layers left there. block_table: int32 [pages] of the request.
        """
        positions = torch.arange(position0, position0 + len(following))[None]
        x = self.join(following[None], self.model_output(residual)[None])
        return self.through_layers(x, self.span(positions, block_table[None]))[0, -1]

    @torch.no_grad()
    def advance(
        self, following: Sequence[int], hidden: torch.Tensor, positions: Sequence[int], block_table: torch.Tensor
    ) -> torch.Tensor:
        """The layer at one position of each row: its output, float32 [rows, hidden].

        following: the token after each position. hidden: float32 [rows, hidden], `model_output` there or the layer's
        own output of the position before. block_table: int32 [rows, pages]. Rows of one request see those before them.
        """
        x = self.join(torch.tensor(following)[:, None], hidden[:, None])
        return self.through_layers(x, self.span(torch.tensor(positions)[:, None], block_table))[:, 0]

    @torch.no_grad()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the token after the next, float32 [rows, vocab], of the layer's outputs x [rows, hidden]."""
        return self.head(x)

    def model_output(self, residual: torch.Tensor) -> torch.Tensor:
        """What the layer sees of the residual stream [..., hidden] that the model's layers left."""
        return rms_norm(residual, self.main.weights.final_norm, self.config.rms_norm_eps)

    def join(self, following: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input: tokens [...] and hidden states [..., hidden] to float32 [..., hidden]."""
        eps = self.config.rms_norm_eps
        embedded = rms_norm(self.embed(following), self._embed_norm, eps)
        both = torch.cat([embedded, rms_norm(hidden, self._hidden_norm, eps)], dim=-1)
        return self.products.island(both, self.layers[0].matrix("eh_proj"))

    def head_matrix(self) -> torch.Tensor:
        """The model's."""
        return self.main.head_matrix()


def _vector(layer: Layer, field: str) -> torch.Tensor:
    values = layer[field]
    assert not isinstance(values, PackedMatrix)
    return values
