"""The choice of a token from its logits. What this gives, every kernel gives, bit for bit.

In order: logit bias, repetition penalty, frequency penalty, presence penalty; greedy ends here, of equal logits the
lowest token. Else: division by the temperature, min-p, top-k, top-p, and a draw.

Each filter is a threshold, so tokens that tie with the last one kept are kept too, and no order of equals has to be
agreed on. Probabilities are integers (`weights`) and so are their sums: they do not depend on the order of summation,
which a kernel's threads could not keep. Float32 operations are written in the order in which they are done; none is
fused.

Rejected: Gumbel noise on every logit, which needs one random number a token of the vocabulary where this needs one a
draw; and float32 sums, whose last bits, near the edge of top-p, decide over a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocmega.sampling.params import SamplingParams
from rocmega.sampling.philox import draw

if TYPE_CHECKING:
    import torch

LOG2E = 1.44269502  # the float32 nearest to log2(e)
FRACTION_BITS = 26  # of the exponent -log2(weight), in fixed point
# 2^-f for 0 <= f < 1 in units of 2^-31, alternating signs: Chebyshev's fit, relative error 2.6e-9.
POWER = (2147483645, 1488521950, 515877875, 119166091, 20573019, 2739580, 234908)


@dataclass
class Uses:
    """Which tokens a request has used: those of its prompt, and how often those of its answer."""

    prompt: frozenset[int]
    answer: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Choice:
    """One token to be chosen: the request's parameters and seed, the token's number in the answer, what was used.

    `uses` is needed for penalties only.
    """

    params: SamplingParams
    seed: int
    number: int
    uses: Uses | None = None


def choose_rows(logits: torch.Tensor, choices: Sequence[Choice | None]) -> list[int]:
    """A token for each row of logits float32 [rows, vocab]: by its choice, or the largest."""
    largest: list[int] = logits.argmax(dim=-1).tolist()
    pairs = zip(logits, choices, largest, strict=True)
    return [token if choice is None else choose(row, choice) for row, choice, token in pairs]


def choose(logits: torch.Tensor, choice: Choice) -> int:
    """The token that follows; logits float32 [vocab], not changed."""
    params = choice.params
    logits = adjust(logits, params, choice.uses)
    if params.greedy:
        return int((logits == logits.max()).nonzero()[0])
    z = logits / float32(params.temperature or 1.0, logits)
    mass = weights(z).masked_fill_(~keep(z, params), 0).cumsum(0)
    place = draw(choice.seed, choice.number) * int(mass[-1]) >> 64
    return int((mass > place).nonzero()[0])


def adjust(logits: torch.Tensor, params: SamplingParams, uses: Uses | None = None) -> torch.Tensor:
    """Logits with bias and penalties, float32 [vocab]; the input itself if there are none."""
    import torch

    if not params.logit_bias and not params.penalized:
        return logits
    out = logits.clone()
    if params.logit_bias:
        out[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), device=out.device)
    if not params.penalized:
        return out
    assert uses is not None, "penalties need what has been used"
    seen = list(uses.prompt | uses.answer.keys())
    if params.repetition_penalty != 1:
        old, penalty = out[seen], float32(params.repetition_penalty, out)
        out[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if uses.answer:
        times = torch.tensor(list(uses.answer.values()), dtype=torch.float32, device=out.device)
        out[list(uses.answer)] -= times * float32(params.frequency_penalty, out)
        out[list(uses.answer)] -= float32(params.presence_penalty, out)
    return out


def weights(z: torch.Tensor) -> torch.Tensor:
    """exp(z - max(z)) in units of 2^-31, int64 [vocab]: 0 below 2^-31 of the largest."""
    import torch

    exponent = ((z.max() - z) * float32(LOG2E, z)).clamp_max_(32)
    fixed = (exponent * float(1 << FRACTION_BITS)).to(torch.int64)  # a power of two: exact, then cut off
    fraction = (fixed & (1 << FRACTION_BITS) - 1) << 31 - FRACTION_BITS
    power = torch.full_like(fixed, POWER[-1])
    for coefficient in reversed(POWER[:-1]):
        power = coefficient - (power * fraction >> 31)
    return power >> (fixed >> FRACTION_BITS)


def keep(z: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Which tokens min-p, top-k and top-p leave, bool [vocab]; z are logits over temperature, float32 [vocab]."""
    kept = z > float("-inf")
    if params.min_p > 0:
        kept &= z.max() - z <= float32(-math.log(params.min_p), z)
    if 0 < params.top_k < z.shape[0]:
        kept &= z >= z.topk(params.top_k).values[-1]
    if params.top_p < 1:
        kept &= z >= _nucleus(z, kept, params.top_p)
    return kept


def float32(value: float, like: torch.Tensor) -> torch.Tensor:
    """A float32 on a tensor's device. (CUDA does not divide by a Python number: it multiplies by its inverse.)"""
    import torch

    return torch.tensor(value, dtype=torch.float32, device=like.device)


def top_p_units(top_p: float) -> int:
    """top_p below 1 in units of 2^-32, as a word that is not 0."""
    return min(max(1, round(top_p * (1 << 32))), (1 << 32) - 1)


def _nucleus(z: torch.Tensor, kept: torch.Tensor, top_p: float) -> torch.Tensor:
    """The largest threshold at which the kept tokens from there up have top_p of the kept tokens' weight."""
    ordered, order = z.sort(descending=True)
    mass = weights(z).masked_fill(~kept, 0)[order].cumsum(0)
    wanted = max(1, int(mass[-1]) * top_p_units(top_p) >> 32)
    return ordered[int((mass >= wanted).nonzero()[0])]
