"""What can be asked of a request, with vLLM's names and meanings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rocmega.errors import RequestError

MAX_LOGPROBS, MAX_BIASES = 20, 1024


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. By default decoding is greedy.

    max_tokens: how many tokens to generate at most.
    temperature: None or 0 is greedy; else logits are divided by it.
    top_k: only the k likeliest tokens, and what ties with the last of them; 0 or -1: all.
    top_p: only the fewest likeliest tokens that have this share of the probability (of what min_p and top_k leave).
    min_p: only tokens with at least this share of the likeliest one's probability.
    repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in prompt or answer.
    frequency_penalty, presence_penalty: taken off the logits of tokens in the answer, for each time, and once.
    logit_bias: token id -> what is added to its logit.
    seed: the same seed gives the same tokens, whatever else is in the batch; None: one drawn for the request.
    logprobs: for every token the log probabilities of so many likeliest tokens and of the token itself, by the model's
    own logits: before bias, penalties and temperature.
    stop: texts that end the answer; they are not part of it unless include_stop_str_in_output.
    stop_token_ids: end after one of these, too. ignore_eos: go on after an end-of-sequence token.

    Raises RequestError, with every fault, for values that are not possible.
    """

    max_tokens: int = 16
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        faults = [
            fault for name, holds, wanted in _RULES if (fault := _fault(name, getattr(self, name), holds, wanted))
        ]
        if faults:
            raise RequestError(f"These sampling parameters cannot be: {'; '.join(faults)}.")

    @property
    def greedy(self) -> bool:
        """The likeliest token each time."""
        return not self.temperature

    @property
    def penalized(self) -> bool:
        """Whether tokens that are there already change logits."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def plain(self) -> bool:
        """Whether the choice is the largest logit as the model gives it: the mega-task makes it by itself."""
        return self.greedy and not self.penalized and not self.logit_bias

    def check_vocab(self, vocab: int) -> None:
        """Raises RequestError for token ids that a vocabulary of this size does not have."""
        for name in ("stop_token_ids", "logit_bias"):
            bad = next((token for token in getattr(self, name) if not 0 <= token < vocab), None)
            if bad is not None:
                raise RequestError(f"{name} holds token {bad}; this model's tokens are 0 to {vocab - 1}.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _bias(value: Any) -> bool:
    return _number(value) and abs(value) <= 1e4


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(value: Any) -> bool:
    return not isinstance(value, (str, bytes)) and all(_whole(token) for token in value)


def _fault(name: str, value: Any, holds: Callable[[Any], bool], wanted: str) -> str | None:
    try:
        fits = holds(value)
    except TypeError:
        fits = False
    return None if fits else f"{name}={value!r} is not {wanted}"


# float32 has no smaller temperature whose inverse it can hold.
LEAST_TEMPERATURE = 1e-30
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", lambda v: _whole(v) and v >= 1, "a whole number of at least 1"),
    (
        "temperature",
        lambda v: v is None or (_number(v) and (v == 0 or LEAST_TEMPERATURE <= v <= 1e6)),
        f"None, 0, or a number from {LEAST_TEMPERATURE:g} to 1e6",
    ),
    ("top_k", lambda v: _whole(v) and v >= -1, "a whole number, at least 1, or 0 or -1 for all"),
    ("top_p", lambda v: _number(v) and 0 < v <= 1, "above 0 and at most 1"),
    ("min_p", lambda v: _number(v) and 0 <= v <= 1, "from 0 to 1"),
    ("repetition_penalty", lambda v: _number(v) and 1e-6 <= v <= 1e6, "a positive number, from 1e-6 to 1e6"),
    ("frequency_penalty", lambda v: _number(v) and -2 <= v <= 2, "from -2 to 2"),
    ("presence_penalty", lambda v: _number(v) and -2 <= v <= 2, "from -2 to 2"),
    (
        "logit_bias",
        lambda v: isinstance(v, Mapping) and len(v) <= MAX_BIASES and _token_ids(v) and all(map(_bias, v.values())),
        f"at most {MAX_BIASES} token ids with numbers from -1e4 to 1e4",
    ),
    ("seed", lambda v: v is None or (_whole(v) and -(1 << 63) <= v < 1 << 64), "None or a 64-bit number"),
    (
        "logprobs",
        lambda v: v is None or (_whole(v) and 0 <= v <= MAX_LOGPROBS),
        f"None or a whole number from 0 to {MAX_LOGPROBS}",
    ),
    ("stop", lambda v: all(isinstance(text, str) and text for text in v), "texts that are not empty"),
    ("stop_token_ids", _token_ids, "token ids"),
)
