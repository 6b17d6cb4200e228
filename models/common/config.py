"""Reading a config.json: what every family does alike.

A field is read, or fixed to the only value we run, or known not to matter for one decode step; anything else is
refused. All reasons are collected before anything is raised.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, ClassVar, TypeVar

from rocmega.errors import ConfigError

Kind = TypeVar("Kind")

LARGEST = {"num_hidden_layers": 10_000}  # lists as long as the model is deep are built before anything is read

# Known, and without influence on a decode step's result.
IRRELEVANT = {
    "architectures", "auto_map", "_name_or_path", "_attn_implementation", "transformers_version", "dtype",
    "torch_dtype", "attention_dropout", "initializer_range", "use_cache", "ep_size", "pretraining_tp", "bos_token_id",
    "pad_token_id", "num_nextn_predict_layers", "return_dict", "output_attentions", "output_hidden_states",
    "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "is_encoder_decoder", "router_aux_loss_coef",
    "aux_loss_alpha", "seq_aux", "output_router_logits",
}  # fmt: skip


class ConfigReader:
    """Collects fields and reasons; a family's `read` returns its configuration or raises with all of them.

    Fields, each a family's own:
        sizes: positive integers.
        numbers: positive numbers.
        fixed: the only value that is run, if the field is there (None counts as absent).
        own: fields that the family reads by rules of its own.
        irrelevant: known, and without influence on a decode step's result.
    """

    sizes: ClassVar[tuple[str, ...]]
    numbers: ClassVar[tuple[str, ...]]
    fixed: ClassVar[dict[str, Any]]
    own: ClassVar[set[str]]
    irrelevant: ClassVar[set[str]]

    def __init__(self, config: dict[str, Any]):
        self.config = {name: value for name, value in config.items() if value is not None}
        self.reasons: list[str] = []

    def _refuse(self, reason: str) -> None:
        self.reasons.append(reason)

    def _raise_reasons(self) -> None:
        if self.reasons:
            count = f"{len(self.reasons)} reasons" if len(self.reasons) > 1 else "one reason"
            raise ConfigError(
                f"config.json describes a model that cannot be run, for {count}: " + "; ".join(self.reasons) + "."
            )

    # Single fields. A refused one reads as 1, so that the other checks can go on.

    def _size(self, name: str) -> int:
        value = self.config.get(name)
        if type(value) is int and 0 < value <= LARGEST.get(name, 2**31 - 1):
            return value
        self._refuse(f"{name} is missing" if value is None else f"{name} is {value!r}, not a sensible positive integer")
        return 1

    def _number(self, name: str) -> float:
        value: Any = self.config.get(name)
        if type(value) in (int, float) and isfinite(value) and value > 0:
            return float(value)
        self._refuse(f"{name} is missing" if value is None else f"{name} is {value!r}, not a positive number")
        return 1.0

    def _check_unknown(self) -> None:
        known = {*self.sizes, *self.numbers, *self.fixed, *self.own, *self.irrelevant}
        for name in sorted(self.config.keys() - known):
            self._refuse(f"{name} is not a field known for this model and could change its mathematics")

    def _check_fixed(self) -> None:
        if "model_type" not in self.config:
            self._refuse("model_type is missing")
        for name, only in self.fixed.items():
            value = self.config.get(name, only)
            if type(value) is not type(only) or value != only:
                self._refuse(f"{name} is {value!r} and only {only!r} is supported")

    def _eos_token_ids(self) -> tuple[int, ...]:
        value = self.config.get("eos_token_id", [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            self._refuse(f"eos_token_id is {value!r}, not a token id or a list of them")
            return ()
        return tuple(ids)

    # Fields that describe the layers, it may be each in more than one way. All that are there must agree.

    def _kinds(self, name: str, layers: int, kinds: dict[str, Kind]) -> tuple[Kind, ...]:
        values = self.config[name]
        if not isinstance(values, (list, tuple, str)) or not all(isinstance(v, str) and v in kinds for v in values):
            self._refuse(f"{name} may hold only {', '.join(repr(kind) for kind in kinds)}, one for each layer")
            return ()
        if len(values) != layers:
            self._refuse(f"{name} has {len(values)} entries for {layers} layers")
            return ()
        return tuple(kinds[value] for value in values)

    def _agreed(self, found: dict[str, tuple[Kind, ...]], default: tuple[Kind, ...]) -> tuple[Kind, ...]:
        readable = {name: kinds for name, kinds in found.items() if kinds}
        if len(set(readable.values())) > 1:
            self._refuse(" and ".join(readable) + " describe different layers")
        return next(iter(readable.values()), default)
