"""Which rows of Engram's tables a token looks up: hashes of the n-grams that end with it.

Multipliers, primes and the order of everything are those of the published `engram.py`: one table for each layer, cut
into columns (n-gram size, head) of prime height; a column's row is its n-gram's hash modulo its height.
"""

from __future__ import annotations

from functools import cache
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rocmega.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from rocmega.checkpoint import Checkpoint
    from rocmega.models.deepseek.config import Engram

_SEED = 10007  # times the layer's number: of its multipliers' generator


@cache
def primes(layers: int, max_ngram_size: int, n_heads: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Heights of each layer's columns, by n-gram size and then by head.

    Every n-gram size begins anew at vocab_size - 1 and takes the next primes that no column of any layer has.
    """
    seen: set[int] = set()
    out = []
    for _ in range(layers):
        columns: list[int] = []
        for _ in range(max_ngram_size - 1):
            height = vocab_size - 1
            for _ in range(n_heads):
                height = _next_prime(height, seen)
                columns.append(height)
        out.append(tuple(columns))
    return tuple(out)


def _next_prime(number: int, seen: set[int]) -> int:
    number += 1
    while number in seen or number < 2 or any(number % divisor == 0 for divisor in range(2, isqrt(number) + 1)):
        number += 1
    seen.add(number)
    return number


def multipliers(layer: int, config: Engram) -> tuple[int, ...]:
    """One odd number for each token of the longest n-gram. No product of it and a compressed id leaves int64."""
    bound = max(1, np.iinfo(np.int64).max // config.compressed_vocab_size // 2)
    drawn = np.random.default_rng(_SEED * layer).integers(0, bound, size=config.max_ngram_size, dtype=np.int64)
    return tuple((drawn * 2 + 1).tolist())


class NgramHash:
    """The rows of one layer's table that n-grams look up."""

    def __init__(self, config: Engram, layer: int, device: torch.device):
        import torch

        at = config.layers.index(layer)
        columns = primes(len(config.layers), config.max_ngram_size, config.n_heads, config.vocab_size)[at]
        self.multipliers = multipliers(layer, config)
        self.heights = torch.tensor(columns, device=device).view(-1, config.n_heads)
        self.offsets = torch.tensor([0, *np.cumsum(columns[:-1]).tolist()], device=device).view_as(self.heights)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., columns] of compressed ids int64 [..., n-gram size], a token's own first, then those before it."""
        import torch

        rolled, rows = ids[..., 0] * self.multipliers[0], []
        for back, multiplier in enumerate(self.multipliers[1:]):
            rolled = rolled ^ (ids[..., back + 1] * multiplier)
            rows.append(rolled[..., None] % self.heights[back] + self.offsets[back])
        return torch.cat(rows, dim=-1)


# Compressed ids.

TOKEN_MAP = "engram.token_map"  # where our own small checkpoints have them: whole numbers [vocab]
_SENTINEL = "\ue000"  # a private character: what is a single space must survive stripping


def has_token_map(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint tells compressed ids, by itself or by its tokenizer."""
    return TOKEN_MAP in checkpoint or (checkpoint.directory / "tokenizer.json").is_file()


def token_map(tokenizer: Path, vocab: int) -> torch.Tensor:
    """Compressed ids, int32 [vocab], of the tokens of a tokenizer.json.

    Tokens whose text is the same without accents, case and kinds of white space share an id; ids count up in the order
    in which tokens have new text. Text that is no whole character counts as the token itself. Raises CheckpointError.
    """
    import torch

    texts = _token_texts(tokenizer, vocab)
    known: dict[str, int] = {}
    return torch.tensor([known.setdefault(text, len(known)) for text in texts], dtype=torch.int32)


def _token_texts(path: Path, vocab: int) -> list[str]:
    try:
        from tokenizers import Regex, Tokenizer, normalizers
    except ImportError:
        raise CheckpointError(
            f"Engram's compressed token ids are made from {path} by the package tokenizers, which is not installed: "
            "pip install 'rocmega[demo]'."
        ) from None
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(_SENTINEL, " "),
        ]
    )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises Exception itself
        raise CheckpointError(f"{path} cannot be read ({error}). Fetch it again.") from None
    out = []
    for token in range(vocab):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            out.append(tokenizer.id_to_token(token) or text)
        else:
            out.append(normalizer.normalize_str(text) or text)
    return out


class Table:
    """One layer's table in memory: plain rows [rows, head_dim], or e4m3 codes and E8M0 scales of each 32 of a row."""

    def __init__(self, config: Engram, layer: int, rows: torch.Tensor, scales: torch.Tensor | None = None):
        self.rows, self.scales = rows, scales
        self.hash = NgramHash(config, layer, rows.device)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Compressed ids int64 [..., n-gram size] to float32 [..., columns * head_dim], on the table's device."""
        import torch

        from rocmega.checkpoint.layouts import StoredMatrix

        at = self.hash.rows(ids.to(self.rows.device))
        taken = self.rows[at].flatten(0, -2)
        if self.scales is not None:
            codes, scales = taken.view(torch.float8_e4m3fn), self.scales[at].flatten(0, -2)
            taken = StoredMatrix("mxfp8", codes, scales).dequantize()
        return taken.to(torch.float32).view(*at.shape[:-1], -1)
