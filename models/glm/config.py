"""GLM's configuration: what config.json must say for our mathematics to be the model's.

A field is read, or fixed to the only value we run, or known not to matter for one decode step; anything else is
refused. All reasons are collected before anything is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.errors import ConfigError
from rocmega.models.common.config import IRRELEVANT, ConfigReader

if TYPE_CHECKING:
    from rocmega.cache import CacheSpec

MODEL_TYPE = "glm_moe_dsa"
CACHE_FORMATS: tuple[str, ...] = ()  # to choose from: none, the cache has the format of what it meets
INDEX_NORM_EPS = 1e-6  # of the index keys' LayerNorm; not in config.json
LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm; not in config.json (see GlmConfig)


@dataclass(frozen=True)
class GlmConfig:
    """A model's dimensions and constants, named as in config.json where it has them.

    Fields that are ours:
        latent_norm_eps: epsilon of q_a_layernorm and kv_a_layernorm. transformers builds them with 1e-6, vLLM with
            rms_norm_eps; config.json does not say. We follow transformers.
        dense_layers: per layer, True for a dense MLP and False for a mixture of experts.
        full_index: per layer, True if it selects for itself and False if it shares the previous full layer's selection.
        quantization: how config.json says that weights are quantized: "fp8" (e4m3, 128x128 blocks), "quark" (MXFP4
            and, it may be, FP8; the tensors tell which), or "".
        num_nextn_predict_layers: layers for guessing ahead that the checkpoint has after the model's own (draft.py).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    dense_layers: tuple[bool, ...]
    full_index: tuple[bool, ...]
    eos_token_ids: tuple[int, ...] = ()
    quantization: str = ""
    num_nextn_predict_layers: int = 0
    latent_norm_eps: float = LATENT_NORM_EPS
    index_norm_eps: float = INDEX_NORM_EPS

    @property
    def quantized(self) -> bool:
        """Whether config.json says that weights are quantized."""
        return bool(self.quantization)

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values of a cached token in one layer: latent and rotated rope channels."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied with."""
        return self.qk_head_dim**-0.5

    @property
    def index_scale(self) -> float:
        """What index key products are multiplied with, before the ReLU."""
        return self.index_head_dim**-0.5

    @property
    def index_weight_scale(self) -> float:
        """What the index heads' weights are multiplied with."""
        return self.index_n_heads**-0.5

    def sections(self, nodes: int) -> list[range]:
        """Each node's layers, as even as can be where every node begins with a layer that selects for itself.

        So no selection crosses a border. Raises ConfigError if there are more nodes than such layers.
        """
        begins = [layer for layer, full in enumerate(self.full_index) if full]
        if not 1 <= nodes <= len(begins):
            raise ConfigError(
                f"{nodes} nodes: each begins with a layer that has an indexer of its own, and this model has "
                f"{len(begins)} of them."
            )
        borders = [0]
        for node in range(1, nodes):
            left = [layer for layer in begins[: len(begins) - (nodes - node - 1)] if layer > borders[-1]]
            borders.append(min(left, key=lambda layer: abs(layer - self.num_hidden_layers * node / nodes)))
        return [range(*pair) for pair in pairwise([*borders, self.num_hidden_layers])]

    def cache_spec(self, cache_format: str) -> CacheSpec:
        """The cache of this model, for weights whose cache format is "f32" or "bf16"."""
        from rocmega.cache import CacheSpec
        from rocmega.checkpoint.tiles import dtype_of

        return CacheSpec(self.latent_dim, self.index_head_dim, self.full_index, dtype_of(cache_format))


def from_dir(directory: str | Path) -> GlmConfig:
    """Reads a checkpoint directory's config.json. Raises ConfigError as `from_dict` does."""
    from rocmega.registry import read_config

    return from_dict(read_config(directory))


def from_dict(config: dict[str, Any]) -> GlmConfig:
    """Reads the object of a config.json. Raises ConfigError with every reason not to run the model."""
    return _Reader(config).read()


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "n_routed_experts", "num_experts_per_tok", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk",
    "max_position_embeddings",
)  # fmt: skip
_NUMBERS = ("routed_scaling_factor", "rms_norm_eps")

# The only value we run, if the field is there (None counts as absent).
_FIXED: dict[str, Any] = {
    "model_type": MODEL_TYPE,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_dtype": "float32",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
}

# Read below, each by its own rule.
_READ = {
    "rope_parameters", "rope_theta", "rope_scaling", "indexer_types", "index_topk_freq", "index_skip_topk_offset",
    "index_topk_pattern", "mlp_layer_types", "first_k_dense_replace", "layer_types", "num_key_value_heads",
    "qk_head_dim", "num_experts", "num_local_experts", "eos_token_id", "quantization_config",
    "num_nextn_predict_layers",
}  # fmt: skip

# Known, and without influence on a decode step's result. head_dim is among them: what it says of GLM is misleading.
_IRRELEVANT = (IRRELEVANT - {"num_nextn_predict_layers"}) | {"head_dim", "index_share_for_mtp_iteration"}

# What transformers calls a layer with the indexer, by version.
_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")


# Fields of Quark's quantization_config. Those that say how activations or the cache would be quantized elsewhere do not
# change the weights' values.
_QUARK = {
    "quant_method", "global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude", "export",
    "algo_config", "kv_cache_quant_config", "kv_cache_post_rope", "softmax_quant_spec", "quant_mode", "version",
    "pack_method", "custom_mode", "min_kv_scale",
}  # fmt: skip


def _is_mxfp4(weight: dict[str, Any]) -> bool:
    scales = weight.get("scale_format", "e8m0")
    return (weight.get("dtype"), weight.get("qscheme"), weight.get("group_size"), scales) == (
        "fp4",
        "per_group",
        32,
        "e8m0",
    )


def _is_block_fp8(weight: dict[str, Any]) -> bool:
    return weight.get("dtype") == "fp8_e4m3" and list(weight.get("block_size") or ()) == [128, 128]


class _Reader(ConfigReader):
    sizes, numbers, fixed, own, irrelevant = _SIZES, _NUMBERS, _FIXED, _READ, _IRRELEVANT

    def read(self) -> GlmConfig:
        fields: dict[str, Any] = {name: self._size(name) for name in self.sizes}
        fields.update({name: self._number(name) for name in self.numbers})
        self._check_unknown()
        self._check_fixed()
        layers = fields["num_hidden_layers"]
        fields["rope_theta"] = self._rope_theta()
        fields["full_index"] = self._full_index(layers)
        fields["dense_layers"] = self._dense_layers(layers)
        fields["eos_token_ids"] = self._eos_token_ids()
        fields["quantization"] = self._quantization()
        fields["num_nextn_predict_layers"] = self._draft_layers()
        self._check_layer_types(layers)
        self._check_sizes(fields)
        self._raise_reasons()
        return GlmConfig(**fields)

    def _size(self, name: str) -> int:
        if name == "n_routed_experts" and name not in self.config:
            for other in ("num_experts", "num_local_experts"):
                if other in self.config:
                    self.config[name] = self.config[other]
                    break
        return super()._size(name)

    def _rope_theta(self) -> float:
        found = {}
        if "rope_theta" in self.config:
            found["rope_theta"] = self.config["rope_theta"]
        for name in ("rope_parameters", "rope_scaling"):
            parameters = self.config.get(name, {})
            if not isinstance(parameters, dict):
                self._refuse(f"{name} is {parameters!r}, not an object")
                continue
            if "rope_theta" in parameters:
                found[f"{name}.rope_theta"] = parameters["rope_theta"]
            self._check_rope_kind(name, parameters)
        for name, value in found.items():
            if type(value) not in (int, float) or not isfinite(value) or value <= 1:
                self._refuse(f"{name} is {value!r}, not a number above 1")
                return 1.0
        if not found:
            self._refuse("rope_theta is missing, in rope_parameters and beside it")
            return 1.0
        if len(set(found.values())) > 1:
            self._refuse(
                "the values of rope_theta differ: " + ", ".join(f"{name} {value}" for name, value in found.items())
            )
        return float(next(iter(found.values())))

    def _check_rope_kind(self, name: str, parameters: dict[str, Any]) -> None:
        only = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
        for key, value in parameters.items():
            if key in only:
                if value != only[key]:
                    self._refuse(f"{name}.{key} is {value!r} and only {only[key]!r} is supported")
            elif key != "rope_theta" and value is not None:
                self._refuse(f"{name}.{key} is not known for this model's rotary embedding")

    # Fields that describe the layers, each in more than one way. All that are there must agree.

    def _full_index(self, layers: int) -> tuple[bool, ...]:
        found: dict[str, tuple[bool, ...]] = {}
        if "indexer_types" in self.config:
            found["indexer_types"] = self._kinds("indexer_types", layers, {"full": True, "shared": False})
        if "index_topk_pattern" in self.config:
            kinds = {"F": True, "S": False, "full": True, "shared": False}
            found["index_topk_pattern"] = self._kinds("index_topk_pattern", layers, kinds)
        if "index_topk_freq" in self.config or "index_skip_topk_offset" in self.config:
            frequency, offset = self.config.get("index_topk_freq", 1), self.config.get("index_skip_topk_offset", 2)
            if type(frequency) is not int or type(offset) is not int or frequency < 1 or offset < 0:
                self._refuse(f"index_topk_freq {frequency!r} with index_skip_topk_offset {offset!r} is no schedule")
            else:
                schedule = tuple(max(layer - offset + 1, 0) % frequency == 0 for layer in range(layers))
                found["index_topk_freq and index_skip_topk_offset"] = schedule
        full = self._agreed(found, (True,) * layers)
        if full and not full[0]:
            self._refuse("the first layer shares a selection, and there is none before it")
        return full

    def _dense_layers(self, layers: int) -> tuple[bool, ...]:
        found: dict[str, tuple[bool, ...]] = {}
        if "mlp_layer_types" in self.config:
            found["mlp_layer_types"] = self._kinds("mlp_layer_types", layers, {"dense": True, "sparse": False})
        if "first_k_dense_replace" in self.config:
            dense = self.config["first_k_dense_replace"]
            if type(dense) is not int or dense < 0:
                self._refuse(f"first_k_dense_replace is {dense!r}, not a natural number")
            else:
                found["first_k_dense_replace"] = tuple(layer < dense for layer in range(layers))
        if not {"mlp_layer_types", "first_k_dense_replace"} & self.config.keys():
            self._refuse("mlp_layer_types and first_k_dense_replace are both missing")
        return self._agreed(found, (True,) * layers)

    def _draft_layers(self) -> int:
        layers = self.config.get("num_nextn_predict_layers", 0)
        if type(layers) is not int or layers < 0:
            self._refuse(f"num_nextn_predict_layers is {layers!r}, not a natural number")
            return 0
        return layers

    def _check_layer_types(self, layers: int) -> None:
        types = self.config.get("layer_types", [])
        if not isinstance(types, list) or not all(kind in _LAYER_TYPES for kind in types):
            self._refuse(f"layer_types may hold only {' or '.join(repr(kind) for kind in _LAYER_TYPES)}")
        elif types and len(types) != layers:
            self._refuse(f"layer_types has {len(types)} entries for {layers} layers")

    def _quantization(self) -> str:
        if "quantization_config" not in self.config:
            return ""
        quantization = self.config["quantization_config"]
        if not isinstance(quantization, dict):
            self._refuse(f"quantization_config is {quantization!r}, not an object")
            return ""
        method = quantization.get("quant_method")
        if method == "fp8":
            self._check_fp8(quantization)
        elif method == "quark":
            self._check_quark(quantization)
        else:
            self._refuse(
                f"quantization_config.quant_method is {method!r} and only 'fp8' (128x128 blocks) and 'quark' (MXFP4) "
                "are supported"
            )
        return str(method)

    def _check_fp8(self, quantization: dict[str, Any]) -> None:
        only: dict[str, Callable[[Any], bool]] = {
            "quant_method": lambda value: True,
            "fmt": lambda value: value == "e4m3",
            "weight_block_size": lambda value: list(value) == [128, 128] if isinstance(value, (list, tuple)) else False,
            "activation_scheme": lambda value: value == "dynamic",
            "modules_to_not_convert": lambda value: isinstance(value, list),  # the tensors themselves tell
        }
        if quantization.get("weight_block_size") is None:
            self._refuse("quantization_config.weight_block_size is missing, and only [128, 128] is supported")
        for name, value in quantization.items():
            if value is None:
                continue
            if name not in only:
                self._refuse(f"quantization_config.{name} is not known for this model")
            elif not only[name](value):
                self._refuse(f"quantization_config.{name} is {value!r}, which is not supported")

    def _check_quark(self, quantization: dict[str, Any]) -> None:
        """AMD Quark's: a scheme for all layers and others for some; which tensor has which, the tensors tell."""
        for name in sorted(quantization.keys() - _QUARK):
            self._refuse(f"quantization_config.{name} is not known for this model")
        export = quantization.get("export")
        if isinstance(export, dict) and export.get("weight_format", "real_quantized") != "real_quantized":
            self._refuse(f"quantization_config.export.weight_format {export['weight_format']!r} is not supported")
        layers = quantization.get("layer_quant_config") or {}
        schemes = {"global_quant_config": quantization.get("global_quant_config")}
        schemes |= {f"layer_quant_config.{name}": scheme for name, scheme in dict(layers).items()}
        for name, scheme in schemes.items():
            weight = scheme.get("weight") if isinstance(scheme, dict) else None
            if not isinstance(weight, dict) or not (_is_mxfp4(weight) or _is_block_fp8(weight)):
                self._refuse(
                    f"quantization_config.{name} has weights of another kind than MXFP4 (fp4 in groups of 32 with e8m0 "
                    "scales) or FP8 in blocks of 128x128"
                )
                return

    def _check_sizes(self, fields: dict[str, Any]) -> None:
        heads = fields["num_attention_heads"]
        nope, rope = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
        equal = {"num_key_value_heads": heads, "qk_head_dim": nope + rope}
        equal.update(dict.fromkeys(("num_experts", "num_local_experts"), fields["n_routed_experts"]))
        for name, expected in equal.items():
            if self.config.get(name, expected) != expected:
                self._refuse(
                    f"{name} is {self.config[name]!r}, which contradicts the other fields: they make it {expected}"
                )
        if rope % 2:
            self._refuse(f"qk_rope_head_dim {rope} is odd, and rotation works on pairs")
        if rope > fields["index_head_dim"]:
            self._refuse(f"qk_rope_head_dim {rope} is more than index_head_dim {fields['index_head_dim']}")
        if fields["num_experts_per_tok"] > fields["n_routed_experts"]:
            self._refuse(
                f"num_experts_per_tok {fields['num_experts_per_tok']} is more than there are experts, "
                f"{fields['n_routed_experts']}"
            )
