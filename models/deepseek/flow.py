"""The stages of decode.hip from outside: whom each waits for, and what it reads of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.published import Formats
from rocmega.models.deepseek.traffic import cache_reads
from rocmega.packing.plan import Field
from rocmega.packing.traffic import read_bytes

# Who leaves the streams, and a sublayer's input, to the next: of the same layer, or of the one before.
_SUBLAYER = ("output", "down_sum", "reduce", "engram_add")
_BEFORE = (*((stage, number) for number in (0, -1) for stage in _SUBLAYER), ("embed", -1))
_INPUT = (("collapse", 0), *_BEFORE)
# Stage -> who makes its input, and in which layer: its own, or the one before.
PRODUCERS: dict[str, tuple[tuple[str, int], ...]] = {
    "look_up": (),
    "engram_map": (("look_up", 0),),
    "embed": (),
    "engram_gather": (("engram_map", 0),),
    "engram_dots": (("engram_map", -1), ("engram_gather", -1), *_BEFORE),
    "engram_add": (("engram_dots", 0), ("site", -1)),
    "mix": _BEFORE,
    "collapse": (("mix", 0),),
    "site": (("mix", 0),),
    "down": _INPUT,
    "down_wide": _INPUT,
    "window_entry": (("down", 0),),
    "compress": (("down_wide", 0),),
    "key_products": (("compress", 0),),
    "compress_keys": (("key_products", 0), ("down_wide", 0)),
    "query": (("down", 0),),
    "index_scores": (("query", 0), ("down_wide", 0), ("compress_keys", 0)),
    "candidates": (("index_scores", 0),),
    "select": (("index_scores", 0), ("candidates", -1)),
    "attend": (("query", 0), ("window_entry", 0), ("compress", 0), ("select", 0), ("select", -1)),
    "merge": (("attend", 0),),
    "output_groups": (("merge", 0),),
    "output": (("output_groups", 0), ("site", 0)),
    "router": _INPUT,
    "shared_gate_up": _INPUT,
    "shared_down": (("shared_gate_up", 0),),
    "gate_up": (("router", 0), *_INPUT),
    "down_sum": (("gate_up", 0), ("shared_down", 0), ("site", 0)),
    "reduce": (("down_sum", 0), ("output", 0)),
    "head": (*_INPUT, ("down_sum", -1)),
    "sample": (("head", 0),),
}
# Stage -> fields of a layer, or of the model's ends.
FIELDS: dict[str, tuple[str, ...]] = {
    "look_up": ("engram_rows", "engram_codes", "engram_scales", "token_map"),
    "engram_map": ("engram_kv",),
    "embed": ("embedding",),
    "engram_dots": ("engram_q_weight", "engram_k_weight"),
    "mix": ("attention_mix", "mlp_mix", "end_mix"),
    "collapse": ("attention_norm", "mlp_norm", "final_norm", "end_mix_base", "end_mix_scale"),
    "site": ("attention_mix_base", "attention_mix_scale", "mlp_mix_base", "mlp_mix_scale"),
    "down": ("q_a", "kv"),
    "down_wide": ("entry_kv", "entry_gate", "key_kv", "key_gate", "index_weights"),
    "window_entry": ("kv_norm",),
    "compress": ("entry_norm", "entry_ape"),
    "key_products": ("key_of_entry",),
    "compress_keys": ("key_norm", "key_ape"),
    "query": ("q_a_norm", "q_b", "index_q"),
    "merge": ("sinks",),
    "output_groups": ("o_a",),
    "output": ("o_b",),
    "router": ("router", "router_bias", "experts_of_token"),
    "shared_gate_up": ("shared_gate_up",),
    "shared_down": ("shared_down",),
    "gate_up": ("gate_up",),
    "down_sum": ("down",),
    "head": ("head",),
}
# Stage -> what of `cache_reads` it reads.
CACHES = {
    "window entries": "attend",
    "compressed entries": "attend",
    "index keys": "index_scores",
    "compressors' state": "compress",
}


def stage_reads(
    config: DeepseekConfig, formats: Formats, fields: Iterable[Field], rows: int, context: int
) -> dict[str, float]:
    """Bytes that each stage reads in a step, by the rules of rocmega.packing.traffic."""
    stage_of = {field: stage for stage, names in FIELDS.items() for field in names}
    reads: dict[str, float] = defaultdict(float)
    for field in fields:
        reads[stage_of[field.name.rsplit(".", 1)[-1]]] += read_bytes(field, rows)
    for what, size in cache_reads(config, formats, context).items():
        reads[CACHES[what]] += rows * size
    return dict(reads)


def indexed_mixtures(config: DeepseekConfig) -> list[bool | None]:
    """Of each layer, all of which are mixtures, whether it has an indexer of its own."""
    return [config.selects(layer) for layer in range(config.num_hidden_layers)]
