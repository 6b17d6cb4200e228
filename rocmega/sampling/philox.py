"""Random numbers that depend on a seed and a counter alone: Philox4x32-10.

After Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Nothing is kept between
draws, so a request's tokens do not depend on what else is in the batch, and a request that is run again draws the same.
"""

from __future__ import annotations

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words. key: 64 bits, its low word first."""
    low, high = key & _WORD, key >> 32 & _WORD
    a, b, c, d = counter
    for _ in range(10):
        one, two = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = two >> 32 ^ b ^ low, two & _WORD, one >> 32 ^ d ^ high, one & _WORD
        low, high = low + _WEYL[0] & _WORD, high + _WEYL[1] & _WORD
    return a, b, c, d


def draw(seed: int, number: int) -> int:
    """64 random bits for a request's token `number`, counted from the answer's first."""
    low, high, _, _ = philox(seed, (number & _WORD, number >> 32, 0, 0))
    return high << 32 | low


def seed_of_request(key: int, number: int) -> int:
    """A seed for a request that came without one: the engine's key and the request's number."""
    low, high, _, _ = philox(key, (number & _WORD, number >> 32, 1, 0))
    return high << 32 | low
