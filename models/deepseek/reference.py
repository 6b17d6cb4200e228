"""A second writing of both generations, token by token in float64: what the standard path is compared with.

No released transformers has a class for V4.1. This follows the published `inference/model.py` and `engram.py` as
directly as plain PyTorch can, shares no code with the rest of this package, and its V4 mode is compared with
transformers' class, which covers everything that the generations share. `Reference.step` is the model from top to
bottom. Readable rather than fast: a tiny model takes some 0.1 s a token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


class Reference:
    """One request. config: the object of a config.json, V4.1's text_config; weights: by published names, dequantized.

    rounded_caches: window, entries, index keys and index queries are rounded as the published implementation does.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], rounded_caches: bool = False):
        self.c, self.rounded = dict(config), rounded_caches
        self.w = {name: t.double() if t.is_floating_point() else t for name, t in weights.items()}
        self.v41 = "kv_source_layer_ids" in config
        self.ratios = _ratios(config)
        dim = config["qk_rope_head_dim"]
        plain = _frequencies(dim, config["rope_theta"], None)
        stretched = _frequencies(dim, config["compress_rope_theta"], config["rope_scaling"])
        self.frequencies = [stretched if ratio else plain for ratio in self.ratios]
        self.tokens: list[int] = []
        self.window: list[list[torch.Tensor]] = [[] for _ in self.ratios]
        self.pending: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.previous: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.entries: dict[int, list[torch.Tensor]] = {}
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.shared: dict[str, Any] = {}

    @torch.no_grad()
    def step(self, token: int) -> torch.Tensor:
        """Runs the next token: logits, float64 [vocab]."""
        c, eps = self.c, self.c["rms_norm_eps"]
        self.tokens.append(int(token))
        self.shared = {}
        h = self.w["embed.weight"][int(token)].repeat(c["hc_mult"], 1)
        pre = F.one_hot(torch.tensor(0), c["hc_mult"]).double()
        for i in range(c["num_hidden_layers"]):
            if i in c.get("engram_layer_ids", ()):
                h = self._engram(i, h)
            for site, sublayer in (("attn", self._attention), ("ffn", self._experts)):
                own, post, comb = self._mixes(f"layers.{i}.hc_{site}_", h)
                x = ((pre if self.v41 else own)[:, None] * h).sum(0)
                y = sublayer(i, _rms(x, self.w[f"layers.{i}.{site}_norm.weight"], eps))
                h = post[:, None] * y + comb.T @ h
                pre = own
        if not self.v41:
            m = _rms(h.flatten(), None, eps) @ self.w["hc_head_fn"].T
            pre = torch.sigmoid(m * self.w["hc_head_scale"] + self.w["hc_head_base"]) + c["hc_eps"]
        return _rms((pre[:, None] * h).sum(0), self.w["norm.weight"], eps) @ self.w["head.weight"].T

    def greedy(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], torch.Tensor]:
        """Runs a prompt and decodes: the tokens, and the logits row behind each, float32 [tokens, vocab]."""
        for token in prompt:
            row = self.step(token)
        chosen, rows = [], []
        for _ in range(tokens):
            rows.append(row.float())
            chosen.append(int(row.argmax()))
            if len(chosen) < tokens:
                row = self.step(chosen[-1])
        return chosen, torch.stack(rows)

    @property
    def position(self) -> int:
        return len(self.tokens) - 1

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T

    def _mixes(self, p: str, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c, s, eps = self.c, self.c["hc_mult"], self.c["hc_eps"]
        scale, base = self.w[p + "scale"], self.w[p + "base"]
        m = _rms(h.flatten(), None, c["rms_norm_eps"]) @ self.w[p + "fn"].T
        pre = torch.sigmoid(m[:s] * scale[0] + base[:s]) + eps
        post = 2 * torch.sigmoid(m[s : 2 * s] * scale[1] + base[s : 2 * s])
        comb = torch.softmax((m[2 * s :] * scale[2] + base[2 * s :]).view(s, s), -1) + eps
        comb = comb / (comb.sum(0, keepdim=True) + eps)
        for _ in range(c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(1, keepdim=True) + eps)
            comb = comb / (comb.sum(0, keepdim=True) + eps)
        return pre, post, comb

    # Attention.

    def _attention(self, i: int, x: torch.Tensor) -> torch.Tensor:
        c, p, freqs, eps = self.c, f"layers.{i}.attn.", self.frequencies[i], self.c["rms_norm_eps"]
        qr = _rms(self._linear(p + "wq_a", x), self.w[p + "q_norm.weight"], eps)
        q = self._linear(p + "wq_b", qr).view(c["num_attention_heads"], c["head_dim"])
        q = _rope(q if self.v41 else _rms(q, None, eps), self.position, freqs)
        kv = _rope(_rms(self._linear(p + "wkv", x), self.w[p + "kv_norm.weight"], eps), self.position, freqs)
        self.window[i] = [*self.window[i], self._round_window(kv)][-c["sliding_window"] :]
        keys = list(self.window[i])
        if self.ratios[i]:
            keys += self._compressed_v41(i, x, qr) if self.v41 else self._compressed_v4(i, x, qr)
        k = torch.stack(keys)
        scores = torch.cat([q @ k.T * c["head_dim"] ** -0.5, self.w[p + "attn_sink"][:, None]], -1)
        o = _rope(scores.softmax(-1)[:, :-1] @ k, self.position, freqs, inverse=True)
        g, rank = c["o_groups"], c["o_lora_rank"]
        z = torch.einsum("gd,grd->gr", o.reshape(g, -1), self.w[p + "wo_a.weight"].view(g, rank, -1))
        return self._linear(p + "wo_b", z.flatten())

    def _compressed_v4(self, i: int, x: torch.Tensor, qr: torch.Tensor) -> list[torch.Tensor]:
        c, p, ratio = self.c, f"layers.{i}.attn.", self.ratios[i]
        indexed = p + "indexer.wq_b.weight" in self.w
        entry = self._pool_v4(p + "compressor.", x, ratio, indexed)
        if entry is not None:
            entry = _rope(entry, self.position + 1 - ratio, self.frequencies[i])
            self.entries.setdefault(i, []).append(self._round_window(entry))
        out = self.entries.get(i, [])
        if not indexed:
            return out
        key = self._pool_v4(p + "indexer.compressor.", x, ratio, True)
        if key is not None:
            key = _rope(key, self.position + 1 - ratio, self.frequencies[i])
            self.keys.setdefault(i, []).append(_fp4(_hadamard(key), 32) if self.rounded else key)
        if not out:
            return out
        scores = self._index_scores(i, x, qr, self.keys[i])
        return [out[j] for j in scores.topk(min(c["index_topk"], len(out))).indices.tolist()]

    def _pool_v4(self, p: str, x: torch.Tensor, ratio: int, overlap: bool) -> torch.Tensor | None:
        gate = self._linear(p + "wgate", x) + self.w[p + "ape"][self.position % ratio]
        waiting = self.pending.setdefault(p, [])
        waiting.append((self._linear(p + "wkv", x), gate))
        if len(waiting) < ratio:
            return None
        kv, score = (torch.stack(of) for of in zip(*waiting, strict=True))
        self.pending[p] = []
        if overlap:  # the first half of the channels waits for the next window
            half = kv.shape[-1] // 2
            before = self.previous.get(p)
            self.previous[p] = kv[:, :half], score[:, :half]
            kv, score = kv[:, half:], score[:, half:]
            if before is not None:
                kv, score = torch.cat([before[0], kv]), torch.cat([before[1], score])
        return _rms((kv * score.softmax(0)).sum(0), self.w[p + "norm.weight"], self.c["rms_norm_eps"])

    def _compressed_v41(self, i: int, x: torch.Tensor, qr: torch.Tensor) -> list[torch.Tensor]:
        c, ratio, shared = self.c, self.ratios[i], self.shared
        if i in c["kv_source_layer_ids"]:
            shared["entries"], shared["keys"] = self.entries.setdefault(i, []), self.keys.setdefault(i, [])
            self._add_v41(i, x, ratio)
        if i in c["index_source_layer_ids"]:
            shared["selected"] = self._select_v41(i, x, qr, (self.position + 1) // ratio)
        return [shared["entries"][j] for j in shared["selected"]]

    def _add_v41(self, i: int, x: torch.Tensor, ratio: int) -> None:
        p, eps, first = f"layers.{i}.attn.", self.c["rms_norm_eps"], self.position + 1 - ratio
        latent = self._linear(p + "compressor.wkv", x)
        if ratio > 1:
            waiting = self.pending.setdefault(p, [])
            waiting.append((latent, self._linear(p + "compressor.wgate", x)))
            if len(waiting) < ratio:
                return
            kv, score = (torch.stack(of) for of in zip(*waiting, strict=True))
            self.pending[p] = []
            latent = (kv * score.softmax(0)).sum(0)
        latent = _rms(latent, self.w[p + "compressor.norm.weight"], eps)
        key = _rms(self._linear(p + "indexer.wk", latent), self.w[p + "indexer.k_norm.weight"], eps)
        key, entry = (_rope(of, first, self.frequencies[i]) for of in (key, latent))
        self.keys[i].append(_fp4(key, 32) if self.rounded else key)
        self.entries[i].append(_fp4(entry, 16, e4m3_scale=True) if self.rounded else entry)

    def _select_v41(self, i: int, x: torch.Tensor, qr: torch.Tensor, count: int) -> list[int]:
        c, shared, source = self.c, self.shared, self.c.get("candidate_source_layer_id", -1)
        if not count:
            return []
        scores = self._index_scores(i, x, qr, shared["keys"][:count])
        if i == source:
            size = c["candidate_block_size"]
            blocks = F.pad(scores, (0, -count % size), value=-math.inf).unflatten(0, (-1, size)).amax(-1)
            blocks[(count - 1) // size] = math.inf
            kept = torch.zeros_like(blocks, dtype=torch.bool)
            kept[blocks.topk(min(c["candidate_topk_blocks"], blocks.numel())).indices] = True
            shared["candidates"] = kept.repeat_interleave(size)[:count]
        elif 0 <= source < i:
            scores = scores.masked_fill(~shared["candidates"], -math.inf)
        top = scores.topk(min(c["index_topk"], count))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return sorted(j for j, score in pairs if score > -math.inf)

    def _index_scores(self, i: int, x: torch.Tensor, qr: torch.Tensor, keys: list[torch.Tensor]) -> torch.Tensor:
        c, p = self.c, f"layers.{i}.attn.indexer."
        q = self._linear(p + "wq_b", qr).view(c["index_n_heads"], c["index_head_dim"])
        q = _rope(q, self.position, self.frequencies[i])
        if self.rounded:
            q = _fp4(q if self.v41 else _hadamard(q), 32)
        heads = self._linear(p + "weights_proj", x) * (c["index_head_dim"] ** -0.5 * c["index_n_heads"] ** -0.5)
        return (F.relu(q @ torch.stack(keys).T) * heads[:, None]).sum(0)

    def _round_window(self, entry: torch.Tensor) -> torch.Tensor:
        """As the window is kept, and V4's compressed entries too."""
        if not self.rounded:
            return entry
        if self.v41:
            return _fp8(entry, 32)
        plain = entry.shape[-1] - self.c["qk_rope_head_dim"]
        return torch.cat([_fp8(entry[:plain], math.gcd(64, plain)), entry[plain:].bfloat16().double()])

    # Experts and Engram.

    def _experts(self, i: int, x: torch.Tensor) -> torch.Tensor:
        c, p = self.c, f"layers.{i}.ffn."
        scores = F.softplus(self._linear(p + "gate", x)).sqrt()
        if p + "gate.tid2eid" in self.w:
            chosen = self.w[p + "gate.tid2eid"][self.tokens[-1]].long()
        else:
            chosen = (scores + self.w[p + "gate.bias"]).topk(c["num_experts_per_tok"]).indices
        weights = scores[chosen] / (scores[chosen].sum() + 1e-20) * c["routed_scaling_factor"]
        y = self._expert(p + "shared_experts.", x)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            y = y + weight * self._expert(f"{p}experts.{expert}.", x)
        return y

    def _expert(self, p: str, x: torch.Tensor) -> torch.Tensor:
        limit = self.c["swiglu_limit"]
        gate, up = self._linear(p + "w1", x).clamp(max=limit), self._linear(p + "w3", x).clamp(-limit, limit)
        return self._linear(p + "w2", F.silu(gate) * up)

    def _engram(self, i: int, h: torch.Tensor) -> torch.Tensor:
        c, p, s, eps = self.c, f"layers.{i}.engram.", self.c["hc_mult"], self.c["rms_norm_eps"]
        rows = self.w[p + "embed.weight"][self._engram_rows(i)].flatten()
        *keys, value = self._linear(p + "wkv", rows).view(s + 1, -1)
        weight = self.w[p + "q_weight"] * self.w[p + "k_weight"]
        dot = (_rms(h, None, eps) * weight * _rms(torch.stack(keys), None, eps)).sum(-1) * c["hidden_size"] ** -0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
        return h + gate[:, None] * value

    def _engram_rows(self, i: int) -> list[int]:
        c, ids = self.c, self.w["engram.token_map"]
        size, heads = c["engram_max_ngram_size"], c["engram_n_heads"]
        bound = max(1, (np.iinfo(np.int64).max // c["engram_compressed_vocab_size"]) // 2)
        drawn = np.random.default_rng(10007 * i).integers(0, bound, size=(size,), dtype=np.int64)
        factors = [int(number) * 2 + 1 for number in drawn]
        back = [self.tokens[-1 - k] if k < len(self.tokens) else c["engram_pad_token_id"] for k in range(size)]
        primes: list[int] = []
        seen: set[int] = set()
        for _ in range(c["engram_layer_ids"].index(i) + 1):
            primes = []
            for _ in range(size - 1):
                prime = c["engram_vocab_size"] - 1
                for _ in range(heads):
                    prime = next(n for n in itertools.count(prime + 1) if n not in seen and _is_prime(n))
                    seen.add(prime)
                    primes.append(prime)
        rolled, rows, offset = int(ids[back[0]]) * factors[0], [], 0
        for k in range(1, size):
            rolled ^= int(ids[back[k]]) * factors[k]
            for prime in primes[(k - 1) * heads : k * heads]:
                rows.append(offset + rolled % prime)
                offset += prime
        return rows


def _ratios(config: Mapping[str, Any]) -> list[int]:
    if "layer_types" not in config:
        return list(config["compress_ratios"])[: config["num_hidden_layers"]]
    return [config["compress_rates"].get(kind, 0) for kind in config["layer_types"]]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def _frequencies(dim: int, base: float, yarn: Mapping[str, Any] | None) -> torch.Tensor:
    f = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if yarn is None:
        return f
    turns = [
        yarn["original_max_position_embeddings"] / (yarn[name] * 2 * math.pi) for name in ("beta_fast", "beta_slow")
    ]
    low, high = (dim * math.log(turn) / (2 * math.log(base)) for turn in turns)
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return f / yarn["factor"] * ramp + f * (1 - ramp)


def _rope(x: torch.Tensor, position: int, frequencies: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    dim, angle = 2 * frequencies.numel(), position * frequencies
    cos, sin = angle.cos(), angle.sin() * (-1 if inverse else 1)
    a, b = x[..., -dim::2], x[..., -dim + 1 :: 2]
    return torch.cat([x[..., :-dim], torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)], -1)


# What the published implementation rounds its caches to.


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(x)))


def _fp8(x: torch.Tensor, block: int) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, block))
    scale = _power_of_two(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)
    return ((groups / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def _fp4(x: torch.Tensor, block: int, e4m3_scale: bool = False) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, block))
    most = groups.abs().amax(-1, keepdim=True)
    if e4m3_scale:
        scale = (most / 6).clamp(2.0**-9, 448.0).float().to(torch.float8_e4m3fn).double()
    else:
        scale = _power_of_two(most.clamp_min(6 * 2.0**-126) / 6)
    y = (groups / scale).clamp(-6, 6)
    middles = (_E2M1[1:] + _E2M1[:-1]) / 2
    low, high = (torch.bucketize(y.abs(), middles, right=right) for right in (False, True))
    size = _E2M1[torch.where(low == high, low, low + (low & 1))]  # a tie goes to the even code
    return (torch.copysign(size, y) * scale).flatten(-2)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """Normalized Walsh-Hadamard transform over the last dimension."""
    size, width, y = 1, x.shape[-1], x
    while size < width:
        y = y.unflatten(-1, (width // (2 * size), 2, size))
        y = torch.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), -2).flatten(-3)
        size *= 2
    return y * width**-0.5
