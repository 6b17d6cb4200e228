"""DeepSeek's mathematics without weights: the float32 formulas of a decode step that no other family has.

Shapes: streams [..., S, hidden]; N groups of queries; F finished entries, each of T tokens. Activations are float32.
These functions are what the kernels' stages are tested against.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from rocmega.models.common.formulas import inverse_rms, merge_partials, rope_adjacent, select
from rocmega.models.deepseek.config import Yarn

# Residual streams (mHC).


def stream_gates(mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """sigmoid(mixes * scale + base): one weight for each stream, of [..., S]."""
    return torch.sigmoid(mixes * scale + base)


def sinkhorn(logits: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """A square [..., S, S] whose rows and columns sum to about 1: softmax of rows, then rows and columns in turn.

    The first round normalizes columns alone; eps is added to the softmax and to every divisor.
    """
    square = logits.softmax(-1) + eps
    square = square / (square.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        square = square / (square.sum(-1, keepdim=True) + eps)
        square = square / (square.sum(-2, keepdim=True) + eps)
    return square


def site_weights(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, streams: int, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one sublayer's mixing weights [..., (2 + S) * S] say: collapse [..., S], expand [..., S], mix [..., S, S].

    scale [3] and base [(2 + S) * S] are the layer's. `mix` is summed over its first stream: see `expand`.
    """
    one, two = streams, 2 * streams
    collapse = stream_gates(mixes[..., :one], scale[0], base[:one]) + eps
    spread = 2 * stream_gates(mixes[..., one:two], scale[1], base[one:two])
    logits = (mixes[..., two:] * scale[2] + base[two:]).unflatten(-1, (streams, streams))
    return collapse, spread, sinkhorn(logits, rounds, eps)


def collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A sublayer's input [..., hidden]: the streams [..., S, hidden] weighted by [..., S] and summed."""
    return (weights[..., None] * streams).sum(-2)


def expand(streams: torch.Tensor, y: torch.Tensor, spread: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """The streams after a sublayer: new[t] = spread[t] * y + sum_s mix[s][t] * streams[s]."""
    return spread[..., None] * y[..., None, :] + mix.mT @ streams


# Rotary embedding.


def frequencies(dim: int, theta: float, yarn: Yarn | None, device: torch.device | str = "cpu") -> torch.Tensor:
    """What each of the dim / 2 channel pairs turns by per position, float32.

    With YaRN, pairs that turn fewer than beta_slow times within the original context are slowed by the factor, those
    that turn more than beta_fast times stay, and in between it is a linear mixture over the pair's number. Angles alone
    change: this family has no mscale.
    """
    turns = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    if yarn is None:
        return turns

    def pair(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), dim - 1)
    numbers = torch.arange(dim // 2, dtype=torch.float32, device=device)
    slowed = ((numbers - low) / max(high - low, 1e-3)).clamp(0, 1)
    return turns / yarn.factor * slowed + turns * (1 - slowed)


def rope_trailing(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates the last channels of x [..., width] in adjacent pairs, as many as the angles are for; the rest stays."""
    dim = 2 * angles.shape[-2]
    return torch.cat([x[..., :-dim], rope_adjacent(x[..., -dim:], angles)], dim=-1)


def backward(angles: torch.Tensor) -> torch.Tensor:
    """Angles that undo a rotation."""
    return torch.stack([angles[..., 0], -angles[..., 1]], dim=-1)


# Compressed entries.


def pooled(values: torch.Tensor, gates: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Entries [F, width] of tokens' values [F, T, width]: weighted channel by channel by the softmax of their gates.

    known bool [F, T]: tokens that exist; at least one does.
    """
    weights = gates.masked_fill(~known[..., None], float("-inf")).softmax(1)
    return (values * weights).sum(1)


def overlapping(values: torch.Tensor) -> torch.Tensor:
    """Values [F, T, 2 * width] of an entry's tokens and as many before them, to [F, T, width].

    Earlier tokens give their first half of the channels, the entry's own their second.
    """
    tokens, width = values.shape[1] // 2, values.shape[-1] // 2
    return torch.cat([values[:, :tokens, :width], values[:, tokens:, width:]], dim=1)


def block_scores(scores: torch.Tensor, counts: torch.Tensor, block_size: int) -> torch.Tensor:
    """The highest of each block's index scores, [B, Q, blocks], of scores [B, Q, L], of which `counts` are seen.

    Infinite for the newest block, which is always chosen; -inf for blocks that nobody sees. counts int64 [B, Q].
    """
    length = scores.shape[-1]
    seen = torch.arange(length, device=scores.device) < counts[..., None]
    padded = F.pad(scores.masked_fill(~seen, float("-inf")), (0, -length % block_size), value=float("-inf"))
    best = padded.unflatten(-1, (-1, block_size)).amax(-1)
    return best.scatter(-1, _newest(counts, block_size)[..., None], float("inf"))


def candidate_blocks(
    best: torch.Tensor, counts: torch.Tensor, blocks: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `blocks` blocks by `block_scores`, ties to the lowest: numbers and validity as `select` gives them."""
    return select(best, _newest(counts, block_size), blocks)


def candidate_mask(chosen: torch.Tensor, valid: torch.Tensor, block_size: int, length: int) -> torch.Tensor:
    """Which of `length` entries may be selected, bool [B, Q, L], if these blocks [B, Q, K] are candidates."""
    kept = chosen.new_zeros(*chosen.shape[:-1], -(-length // block_size), dtype=torch.int8)
    kept = kept.scatter_reduce_(-1, chosen, valid.to(torch.int8), "amax")
    return kept.to(torch.bool).repeat_interleave(block_size, dim=-1)[..., :length]


def _newest(counts: torch.Tensor, block_size: int) -> torch.Tensor:
    return (counts - 1).clamp_min(0) // block_size


# Attention.

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # as `attention_partial` gives them


def with_sinks(partials: list[Partial], sinks: torch.Tensor) -> torch.Tensor:
    """Attention [..., H, D] over several sets of entries, of its parts [..., H, D], [..., H], [..., H].

    sinks [H] are scores that take part in the softmax and have no value.
    """
    outs, maxima, sums = (torch.stack(of) for of in zip(*partials, strict=True))
    sink = sinks.expand_as(maxima[:1])
    return merge_partials(
        torch.cat([outs, torch.zeros_like(outs[:1])]),
        torch.cat([maxima, sink]),
        torch.cat([sums, torch.ones_like(sink)]),
    )


# Experts and Engram.


def router_scores(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(x))."""
    return F.softplus(logits).sqrt()


def hash_route(scores: torch.Tensor, experts: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [T, topk] that a table chose, ascending, and their weights as `route` makes them of scores [T, E]."""
    experts = experts.sort(dim=-1).values
    chosen = scores.gather(1, experts)
    return experts, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * factor


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * up, with up kept within -limit and limit."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def engram_gate(
    streams: torch.Tensor, keys: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """How much of the value each stream takes, [..., S]: streams and keys [..., S, hidden], weights [S, hidden].

    sigmoid(sign(d) * sqrt(max(|d|, 1e-6))) for d = rms(stream) * query_weight . key_weight * rms(key) / sqrt(hidden).
    """
    products = streams * inverse_rms(streams, eps) * query_weight * key_weight * (keys * inverse_rms(keys, eps))
    dot = products.sum(-1) * streams.shape[-1] ** -0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
