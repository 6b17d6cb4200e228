"""Mathematics that families share, without weights: the float32 formulas of a decode step.

Shapes: B sequences of Q tokens each; H heads or index heads; L cached positions of a sequence; K selected ones.
Activations are float32. These functions are what the kernels' stages are tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

KEY_BLOCK = 4096  # index keys scored at a time

# A batched matrix product [n, m, k] @ [n, k, l] into float32. On a GPU it may use narrower operands.
Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def float32_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product as the formulas mean it."""
    return a.to(torch.float32) @ b.to(torch.float32)


@dataclass(frozen=True)
class Normed:
    """An RMS-normalized activation whose division is still to come: `values` * `scale`.

    A matrix product commutes with the scale, so kernels multiply `values` as soon as they have them and scale what
    comes out; where inputs of products are rounded, `values` are. `Products` does the same.

    Fields:
        values: float32 [..., width], x * weight.
        scale: float32 [..., 1], 1 / sqrt(mean(x^2) + eps).
    """

    values: torch.Tensor
    scale: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The normalized activation, [..., width]."""
        return self.values * self.scale

    def rows(self) -> Normed:
        """All leading dimensions as one."""
        return Normed(self.values.flatten(0, -2), self.scale.flatten(0, -2))

    def __getitem__(self, index: Any) -> Normed:
        """Indexes the leading dimensions."""
        return Normed(self.values[index], self.scale[index])


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, which stays as one value."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def deferred_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Normed:
    """`rms_norm`, for inputs of matrix products."""
    return Normed(x * weight, inverse_rms(x, eps))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension: x / sqrt(mean(x^2) + eps) * weight."""
    return x * inverse_rms(x, eps) * weight


def fp8_activations(x: torch.Tensor) -> torch.Tensor:
    """What x [..., k] becomes as e4m3 with a float32 scale per 128, the largest magnitude / 448. Float32 [..., k].

    The largest magnitude counts as 1e-10 at least, as in vLLM's quantization per group: 448 / it is finite.
    """
    groups, size = _groups(x, 128)
    most = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10)
    inverse = torch.full_like(most, 448.0) / most  # 448 / x would be 448 * (1 / x)
    return _ungrouped(_e4m3(groups * inverse) * (most / 448.0), size)


def mxfp8_activations(x: torch.Tensor) -> torch.Tensor:
    """The same with a power of two per 32: the next one up from the largest magnitude / 448."""
    groups, size = _groups(x, 32)
    ratio = (groups.abs().amax(-1, keepdim=True) / 448.0).view(torch.int32)
    exponent = ((ratio >> 23) + ((ratio & 0x7FFFFF) != 0)).clamp_min(1)
    scale, inverse = (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)
    return _ungrouped(_e4m3(groups * inverse) * scale, size)


def _groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, int]:
    size = x.shape[-1]
    return F.pad(x, (0, -size % group)).unflatten(-1, (-1, group)), size


def _ungrouped(groups: torch.Tensor, size: int) -> torch.Tensor:
    return groups.flatten(-2)[..., :size]


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(torch.float32)


def pair_angles(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Cosine and sine of positions [...] times each channel pair's frequency [pairs]: float32 [..., pairs, 2]."""
    angles = positions[..., None].to(torch.float32) * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def rope_adjacent(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates the adjacent pairs (2i, 2i + 1) of x [..., dim] in place of each other; angles [..., dim / 2, 2]."""
    cos, sin = angles.unbind(-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def index_scores(
    query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, scale: float, matmul: Matmul = float32_matmul
) -> torch.Tensor:
    """Index scores sum_h weights[h] * relu(query[h] . key * scale), float32 [B, Q, L].

    query [B, Q, H, D], rotated; keys [B, L, D], rotated; weights [B, Q, H], times H^-0.5 already. Scores of positions
    after a token's own are computed too: `select` leaves them out.
    """
    batch, tokens, heads, dim = query.shape
    query = query.reshape(batch, tokens * heads, dim)
    scores = weights.new_empty(batch, tokens, keys.shape[1])
    for start in range(0, keys.shape[1], KEY_BLOCK):
        block = keys[:, start : start + KEY_BLOCK]
        products = matmul(query, block.mT).mul_(scale).relu_().view(batch, tokens, heads, -1)
        scores[..., start : start + KEY_BLOCK] = (weights[:, :, None, :] @ products).squeeze(2)
    return scores


def select(scores: torch.Tensor, positions: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best min(topk, t + 1) positions up to each token's own position t; of equal scores the lowest positions.

    scores float32 [B, Q, L]; positions [B, Q]. Returns positions int64 [B, Q, K], ascending, K = min(topk, L), and
    which of them count, bool [B, Q, K]: a token with fewer than K positions has its own in front.
    """
    length = scores.shape[-1]
    k = min(topk, length)
    at = torch.arange(length, device=scores.device)
    seen = at <= positions[..., None]
    scores = scores.masked_fill(~seen, float("-inf"))
    last = scores.topk(k, dim=-1).values[..., -1:]  # the lowest score that is taken, -inf where all are
    better, equal = scores > last, (scores == last) & seen
    room = k - better.sum(-1, keepdim=True)
    taken = better | (equal & (equal.cumsum(-1) <= room))
    # Taken positions move to the front, in order; all others to a place behind, which is cut off.
    place = torch.where(taken, taken.cumsum(-1) - 1, k)
    selected = at.new_zeros(*scores.shape[:-1], k + 1).scatter_(-1, place, at.expand_as(place))
    return selected[..., :k], at[:k] < taken.sum(-1, keepdim=True)


def attention_partial(
    query: torch.Tensor,
    entries: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    latent: int,
    matmul: Matmul = float32_matmul,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention over some cache entries, not yet normalized, for merging with other parts.

    query [N, M, latent + rope]: N groups of M queries that see the same entries; entries [N, K, latent + rope];
    allowed bool [N, M or 1, K]. Returns the sum of exp(score - maximum) * latent [N, M, latent], the maximum [N, M]
    and the sum of exp(score - maximum) [N, M]; sums are 0 and the maximum -inf where nothing is allowed.
    """
    entries = entries.to(torch.float32)
    scores = (matmul(query, entries.mT) * scale).masked_fill(~allowed, float("-inf"))
    maximum = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - maximum.clamp_min(torch.finfo(torch.float32).min))
    return matmul(weights, entries[..., :latent]), maximum.squeeze(-1), weights.sum(-1)


def merge_partials(outs: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Partial attentions of S parts, [S, ..., latent], [S, ...], [S, ...], to the whole [..., latent]."""
    factors = torch.exp(maxima - maxima.amax(0))
    return (outs * factors[..., None]).sum(0) / (sums * factors).sum(0)[..., None]


def attention(
    query: torch.Tensor,
    entries: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    latent: int,
    matmul: Matmul = float32_matmul,
) -> torch.Tensor:
    """Softmax attention in absorbed form, float32 [N, M, latent]; arguments as in `attention_partial`."""
    scores = matmul(query, entries.mT).mul_(scale).masked_fill_(~allowed, float("-inf"))
    return matmul(scores.softmax(-1), entries[..., :latent])


def route(scores: torch.Tensor, bias: torch.Tensor, topk: int, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts by score plus bias, of equal sums the lowest; weighs them by score alone.

    scores float32 [T, E], after the sigmoid; bias [E]. Returns experts int64 [T, topk], ascending, and weights float32
    [T, topk]: score / (sum of the chosen scores + 1e-20) * factor.
    """
    order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices
    experts = order[:, :topk].sort(dim=-1).values
    return experts, weigh(scores, experts, factor)


def weigh(scores: torch.Tensor, experts: torch.Tensor, factor: float) -> torch.Tensor:
    """Weights float32 [T, topk] of chosen experts [T, topk]: their share of the chosen scores, times `factor`."""
    chosen = scores.gather(1, experts)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * factor
