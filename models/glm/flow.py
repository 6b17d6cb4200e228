"""The stages of decode.hip from outside: whom each waits for, and what it reads of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.published import Formats
from rocmega.models.glm.traffic import cache_reads, unread_fields
from rocmega.packing.plan import Field
from rocmega.packing.traffic import read_bytes

# Stage -> who makes its input, and in which layer: its own, or the one before.
PRODUCERS: dict[str, tuple[tuple[str, int], ...]] = {
    "embed": (),
    "down": (("down_sum", -1), ("reduce", -1), ("embed", -1)),
    "index_weights": (("down_sum", -1), ("reduce", -1), ("embed", -1)),
    "cache_entry": (("down", 0),),
    "query": (("down", 0),),
    "index_scores": (("query", 0), ("index_weights", 0), ("cache_entry", 0)),
    "select": (("index_scores", 0),),
    "latent_query": (("query", 0),),
    "attend": (("latent_query", 0), ("query", 0), ("cache_entry", 0), ("select", 0)),
    "merge": (("attend", 0),),
    "value_up": (("merge", 0),),
    "output": (("value_up", 0),),
    "router": (("output", 0), ("reduce", 0)),
    "gate_up": (("router", 0), ("output", 0), ("reduce", 0)),
    "down_sum": (("gate_up", 0), ("router", 0)),
    "reduce": (("down_sum", 0), ("output", 0)),
    "head": (("down_sum", -1), ("reduce", -1)),
    "sample": (("head", 0),),
}
# Stage -> fields of LayerWeights, or of the model's ends.
FIELDS: dict[str, tuple[str, ...]] = {
    "embed": ("embedding",),
    "down": ("attention_norm", "q_a", "kv_a", "index_k"),
    "index_weights": ("index_weights",),
    "cache_entry": ("kv_a_norm", "index_k_norm"),
    "query": ("q_a_norm", "q_b", "index_q"),
    "latent_query": ("key_up",),
    "value_up": ("value_up",),
    "output": ("o",),
    "router": ("mlp_norm", "router", "router_bias"),
    "gate_up": ("gate_up",),
    "down_sum": ("down",),
    "head": ("final_norm", "head"),
}


def stage_reads(
    config: GlmConfig, formats: Formats, fields: Iterable[Field], rows: int, context: int
) -> dict[str, float]:
    """Bytes that each stage reads in a step, by the rules of rocmega.packing.traffic."""
    stage_of = {field: stage for stage, names in FIELDS.items() for field in names}
    reads: dict[str, float] = defaultdict(float)
    unread = unread_fields(config, context)
    for field in fields:
        name = field.name.rsplit(".", 1)[-1]
        reads[stage_of[name]] += 0 if name in unread else read_bytes(field, rows)
    cached = cache_reads(config, formats, context)
    reads["attend"] += rows * cached["selected latents"]
    reads["index_scores"] += rows * cached["index keys"]
    return dict(reads)


def indexed_mixtures(config: GlmConfig) -> list[bool | None]:
    """Of each layer, whether it has an indexer of its own; None where its MLP is no mixture."""
    return [None if dense else full for dense, full in zip(config.dense_layers, config.full_index, strict=True)]
