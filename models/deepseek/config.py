"""DeepSeek's configuration: what config.json must say for our mathematics to be the model's.

Both generations are read into one `DeepseekConfig`; what differs between them is a field, not a branch on a name. V4 is
flat and written by DeepSeek or by transformers; V4.1 nests the language model in `text_config`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rocmega.models.common.config import IRRELEVANT, ConfigReader

if TYPE_CHECKING:
    from rocmega.models.deepseek.cache import CacheSpec

V4, V41 = "deepseek_v4", "deepseek_v41"
V41_TEXT = "deepseek_v41_text"
CACHE_FORMATS: tuple[str, ...] = ("f32", "bf16", "published")  # to choose from; the last: see records.py


@dataclass(frozen=True)
class Yarn:
    """How long contexts stretch the rotary angles; fields named as in config.json."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Compressed:
    """What a layer attends to beside its window: entries that each stand for `ratio` tokens.

    Fields:
        ratio: tokens of an entry.
        source: the layer that makes the entries, and their index keys.
        selector: the layer whose selection of entries is used; None: all entries are.
        overlap: an entry is made of its own tokens and the `ratio` tokens before them.
        gated: tokens are weighed by a gate; with ratio 1 there is nothing to weigh.
    """

    ratio: int
    source: int
    selector: int | None
    overlap: bool = False
    gated: bool = True


@dataclass(frozen=True)
class Candidates:
    """A selection in two levels: blocks of entries by their best score, then entries of those blocks.

    Fields:
        source: the layer that chooses the blocks; later selectors are bound to them.
        blocks: how many are chosen, the newest always among them.
        block_size: entries of a block.
    """

    source: int
    blocks: int
    block_size: int


@dataclass(frozen=True)
class Engram:
    """Memory that n-grams of tokens look up; fields named as in config.json, without the prefix.

    Fields:
        layers: before which of them it is added.
        rows: of each of these layers' tables.
        copies: ranks that one stands for in what is mapped from rows, where it is measured alone (shard.py).
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    max_ngram_size: int
    n_heads: int
    head_dim: int
    vocab_size: int
    pad_token_id: int
    compressed_vocab_size: int
    copies: int = 1

    @property
    def columns(self) -> int:
        """Rows that a token looks up in each table."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclass(frozen=True)
class DeepseekConfig:
    """A model's dimensions and constants, named as in config.json where it has them.

    Fields that are ours:
        model_type: "deepseek_v4" or "deepseek_v41".
        compressed: per layer, what it attends to beside its window, None if nothing.
        hash_layers: per layer, whether a table chooses the experts by the token alone.
        head_norm: each query head is normalized (V4).
        delayed: a sublayer's input is collapsed with the weights that the sublayer before computed (V4.1); the stack's
            end then needs none of its own.
        keys_from_latent: index keys are made from the entries themselves (V4.1), not by a compressor of their own (V4).
        quantization: "fp8" or ""; scale_block: rows and columns of an FP8 scale.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    max_position_embeddings: int
    routed_scaling_factor: float
    rms_norm_eps: float
    hc_eps: float
    swiglu_limit: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn
    compressed: tuple[Compressed | None, ...]
    hash_layers: tuple[bool, ...]
    candidates: Candidates | None = None
    engram: Engram | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: str = ""
    scale_block: int = 128

    @property
    def quantized(self) -> bool:
        """Whether config.json says that weights are quantized."""
        return bool(self.quantization)

    @property
    def head_norm(self) -> bool:
        return self.model_type == V4

    @property
    def delayed(self) -> bool:
        return self.model_type == V41

    @property
    def keys_from_latent(self) -> bool:
        return self.model_type == V41

    @property
    def mixes(self) -> int:
        """Mixing weights of a site: collapse, expand, and the square that mixes streams."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied with."""
        return self.head_dim**-0.5

    @property
    def index_scale(self) -> float:
        """What index key products are multiplied with, before the ReLU."""
        return self.index_head_dim**-0.5

    @property
    def index_weight_scale(self) -> float:
        """What the index heads' weights are multiplied with."""
        return self.index_n_heads**-0.5

    def makes_entries(self, layer: int) -> bool:
        """Whether a layer has a compressor and a cache of entries."""
        kind = self.compressed[layer]
        return kind is not None and kind.source == layer

    def selects(self, layer: int) -> bool:
        """Whether a layer scores index keys and makes a selection."""
        kind = self.compressed[layer]
        return kind is not None and kind.selector == layer

    def makes_keys(self, layer: int) -> bool:
        """Whether a layer makes index keys for its entries."""
        return self.makes_entries(layer) and any(
            kind is not None and kind.source == layer and kind.selector is not None for kind in self.compressed
        )

    def cache_spec(self, cache_format: str) -> CacheSpec:
        """The cache of this model in a format: "f32", "bf16" or "published"."""
        from rocmega.models.deepseek.cache import CacheSpec

        return CacheSpec(self, cache_format)


def from_dir(directory: str | Path) -> DeepseekConfig:
    """Reads a checkpoint directory's config.json. Raises ConfigError as `from_dict` does."""
    from rocmega.registry import read_config

    return from_dict(read_config(directory))


def from_dict(config: dict[str, Any]) -> DeepseekConfig:
    """Reads the object of a config.json. Raises ConfigError with every reason not to run the model."""
    from rocmega.models.deepseek.layers import V4Reader, V41Reader

    return V41Reader(config).read() if config.get("model_type") in (V41, V41_TEXT) else V4Reader(config).read()


_FIXED: dict[str, Any] = {
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_NO_YARN = Yarn(1.0, 32.0, 1.0, 1)


class Reader(ConfigReader):
    """What both generations are read by; layers.py reads what a layer is."""

    sizes = (
        "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "q_lora_rank", "o_groups", "o_lora_rank", "n_routed_experts", "num_experts_per_tok", "sliding_window",
        "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
    )  # fmt: skip
    numbers = (
        "routed_scaling_factor", "rms_norm_eps", "hc_eps", "swiglu_limit", "rope_theta", "compress_rope_theta",
    )  # fmt: skip
    fixed = _FIXED
    own: ClassVar[set[str]] = {
        "model_type", "qk_rope_head_dim", "partial_rotary_factor", "rope_scaling", "rope_parameters", "compress_ratios",
        "eos_token_id", "quantization_config", "expert_dtype", "num_local_experts", "intermediate_size",
    }  # fmt: skip
    irrelevant = IRRELEVANT | {"router_jitter_noise"}

    block = 128  # rows and columns of an FP8 scale

    def _common(self) -> dict[str, Any]:
        self.config = {name: value for name, value in self.config.items() if not name.startswith("dspark_")}  # drafts
        fields: dict[str, Any] = {name: self._size(name) for name in self.sizes}
        fields.update({name: self._number(name) for name in self.numbers})
        self._check_unknown()
        self._check_fixed()
        fields["qk_rope_head_dim"] = self._rope_dim(fields["head_dim"])
        fields["yarn"] = self._yarn(fields)
        fields["eos_token_ids"] = self._eos_token_ids()
        fields["quantization"] = self._quantization()
        fields["scale_block"] = self.block
        self._check_sizes(fields)
        return fields

    def _ratios(self, layers: int, known: Collection[int] | None = None) -> tuple[int, ...]:
        """compress_ratios: one for each layer, and zeros for draft layers after them."""
        values = self.config.get("compress_ratios")
        if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= 1 << 20 for value in values):
            self._refuse(f"compress_ratios is {'missing' if values is None else 'no list of natural numbers'}")
        elif len(values) < layers or any(values[layers:]):
            self._refuse(f"compress_ratios has {len(values)} entries for {layers} layers; more may be only zeros")
        elif known is not None and set(values) - set(known):
            self._refuse(f"compress_ratios may hold only {', '.join(map(str, known))}: others need layer_types")
        else:
            return tuple(values[:layers])
        return (0,) * layers

    def _rope_dim(self, head: int) -> int:
        size = self.config.get("qk_rope_head_dim")
        factor = self.config.get("partial_rotary_factor")
        if size is None and factor is not None:
            size = int(head * factor) if type(factor) in (int, float) and 0 < factor <= 1 else factor
        if type(size) is not int or size < 2 or size % 2 or size > head:
            self._refuse(f"qk_rope_head_dim is {size!r}, not an even number up to head_dim, {head}")
            return 2
        if factor is not None and (type(factor) not in (int, float) or int(head * factor) != size):
            self._refuse(f"partial_rotary_factor is {factor!r}, which contradicts qk_rope_head_dim {size} of {head}")
        return size

    def _yarn(self, fields: dict[str, Any]) -> Yarn:
        """rope_scaling, or rope_parameters flat or as transformers nests it; all that are there must agree."""
        found: dict[str, Yarn] = {}
        for name in ("rope_scaling", "rope_parameters"):
            parameters = self.config.get(name)
            if parameters is None:
                continue
            if not isinstance(parameters, dict):
                self._refuse(f"{name} is {parameters!r}, not an object")
                continue
            if "compress" in parameters or "main" in parameters:
                self._check_plain_rope(f"{name}.main", parameters.get("main"), fields)
                for other in parameters.keys() - {"main", "compress", "rope_type", "type"}:
                    self._refuse(f"{name}.{other} is not known for this model's rotary embedding")
                parameters, name = parameters.get("compress"), f"{name}.compress"
            read = self._read_yarn(name, parameters, fields["compress_rope_theta"])
            if read is not None:
                found[name] = read
        if len(set(found.values())) > 1:
            self._refuse(" and ".join(found) + " differ")
        if not found and not self.reasons:
            self._refuse("rope_scaling is missing: it says how compressed layers stretch their angles")
        return next(iter(found.values()), _NO_YARN)

    def _check_plain_rope(self, name: str, parameters: Any, fields: dict[str, Any]) -> None:
        only = {"rope_type": "default", "type": "default", "rope_theta": fields["rope_theta"]}
        if not isinstance(parameters, dict):
            self._refuse(f"{name} is {parameters!r}, not an object")
            return
        for key, value in parameters.items():
            if key not in {*only, "partial_rotary_factor"}:
                self._refuse(f"{name}.{key} is not known for this model's rotary embedding")
            elif key in only and value is not None and value != only[key]:
                self._refuse(f"{name}.{key} is {value!r} and only {only[key]!r} is supported")

    def _read_yarn(self, name: str, parameters: Any, theta: float) -> Yarn | None:
        if not isinstance(parameters, dict):
            self._refuse(f"{name} is {parameters!r}, not an object")
            return None
        # mscale is 1 in this family whatever the factor is, unlike in DeepSeek V3.
        only = {"rope_type": "yarn", "type": "yarn", "rope_theta": theta, "attention_factor": 1.0, "truncate": True}
        numbers = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        if "yarn" not in (parameters.get("rope_type"), parameters.get("type")):
            self._refuse(f"{name} has no rope_type 'yarn'")
        for key, value in parameters.items():
            if key in only:
                if value is not None and value != only[key]:
                    self._refuse(f"{name}.{key} is {value!r} and only {only[key]!r} is supported")
            elif key not in {*numbers, "partial_rotary_factor"} and value is not None:
                self._refuse(f"{name}.{key} is not known for this model's rotary embedding")
        values: list[Any] = [parameters.get(key) for key in numbers]
        bad = [
            f"{name}.{key} is {value!r}, not a positive number"
            for key, value in zip(numbers, values, strict=True)
            if type(value) not in (int, float) or not isfinite(value) or value <= 0
        ]
        self.reasons += bad
        if bad:
            return None
        factor, fast, slow, original = values
        return Yarn(float(factor), float(fast), float(slow), int(original))

    def _quantization(self) -> str:
        experts = {"expert_dtype": self.config.get("expert_dtype")}
        quantization = self.config.get("quantization_config")
        if quantization is not None and not isinstance(quantization, dict):
            self._refuse(f"quantization_config is {quantization!r}, not an object")
            return ""
        if quantization is not None:
            experts["quantization_config.expert_dtype"] = quantization.get("expert_dtype")
            self._check_fp8(quantization)
        for name, value in experts.items():
            if value not in (None, "fp4"):
                self._refuse(f"{name} is {value!r} and only 'fp4' is supported")
        return "" if quantization is None else "fp8"

    def _check_fp8(self, quantization: dict[str, Any]) -> None:
        only = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [self.block, self.block],
        }
        for name in ("quant_method", "weight_block_size"):
            if quantization.get(name) is None:
                self._refuse(f"quantization_config.{name} is missing and only {only[name]!r} is supported")
        for name, value in quantization.items():
            if name in only:
                value = list(value) if isinstance(value, tuple) else value
                if value is not None and value != only[name]:
                    self._refuse(f"quantization_config.{name} is {value!r} and only {only[name]!r} is supported")
            elif name not in ("expert_dtype", "modules_to_not_convert") and value is not None:
                self._refuse(f"quantization_config.{name} is not known for this model")

    def _check_sizes(self, fields: dict[str, Any]) -> None:
        equal = {
            "num_local_experts": fields["n_routed_experts"],
            "intermediate_size": fields["moe_intermediate_size"],
        }
        for name, expected in equal.items():
            if self.config.get(name, expected) != expected:
                self._refuse(
                    f"{name} is {self.config[name]!r}, which contradicts the other fields: they make it {expected}"
                )
        if fields["num_attention_heads"] % fields["o_groups"]:
            self._refuse(
                f"num_attention_heads {fields['num_attention_heads']} are not evenly in o_groups {fields['o_groups']}"
            )
        if fields["qk_rope_head_dim"] > fields["index_head_dim"]:
            self._refuse(
                f"qk_rope_head_dim {fields['qk_rope_head_dim']} is more than index_head_dim {fields['index_head_dim']}"
            )
        if fields["num_experts_per_tok"] > fields["n_routed_experts"]:
            self._refuse(
                f"num_experts_per_tok {fields['num_experts_per_tok']} is more than there are experts, "
                f"{fields['n_routed_experts']}"
            )
