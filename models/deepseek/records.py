"""Cache records as the published implementation keeps them: what entries of window, compressed cache or index become.

    window, V4       e4m3 with an E8M0 scale for each 64; rotated channels in bf16    448 + 128 + 7, padded: 584 B
    entries, V4      the same
    window, V4.1     e4m3 with an E8M0 scale for each 32                              512 + 16: 528 B
    entries, V4.1    E2M1 with an e4m3 scale for each 16                              256 + 32: 288 B
    index keys       E2M1 with an E8M0 scale for each 32; V4's are transformed first  64 + 4: 68 B

The models were trained with these roundings. In a record codes come first, then what stays bf16, then scales; V4's end
with zeros up to a multiple of eight bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from rocmega.checkpoint.quantize import E2M1_MAX, E4M3_MAX, next_e8m0, to_e2m1
from rocmega.checkpoint.tiles import E2M1, e8m0_values

if TYPE_CHECKING:
    from rocmega.models.deepseek.config import DeepseekConfig

LEAST_WINDOW = 1e-4  # the smallest magnitude that a window's scale is made for
LEAST_SCALE = 2.0**-9  # of E2M1 with e4m3 scales


class Record(Protocol):
    """How one entry is stored."""

    @property
    def bytes(self) -> int:
        """Of one entry."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Values float32 [..., width] as uint8 [..., bytes]."""

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Float32 [..., width] of uint8 [..., bytes]."""


@dataclass(frozen=True)
class Fp8Record:
    """E4m3 with an E8M0 scale for each `group` channels; the last `wide` channels stay bf16.

    Fields:
        width: channels of an entry.
    """

    width: int
    group: int
    wide: int = 0

    @property
    def narrow(self) -> int:
        return self.width - self.wide

    @property
    def bytes(self) -> int:
        size = self.narrow + 2 * self.wide + self.narrow // self.group
        return -(-size // 8) * 8 if self.wide else size

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """As `Record.encode`."""
        groups = values[..., : self.narrow].unflatten(-1, (-1, self.group))
        scales = next_e8m0(groups.abs().amax(-1).clamp_min(LEAST_WINDOW) / E4M3_MAX)
        codes = (groups / e8m0_values(scales)[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        wide = values[..., self.narrow :].to(torch.bfloat16).contiguous().view(torch.uint8)
        return _padded([codes.flatten(-2).view(torch.uint8), wide, scales], self.bytes)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """As `Record.decode`."""
        codes, wide, scales = stored[..., : self._size()].split(
            [self.narrow, 2 * self.wide, self.narrow // self.group], dim=-1
        )
        groups = codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32).unflatten(-1, (-1, self.group))
        values = (groups * e8m0_values(scales)[..., None]).flatten(-2)
        return torch.cat([values, wide.contiguous().view(torch.bfloat16).to(torch.float32)], dim=-1)

    def _size(self) -> int:
        return self.narrow + 2 * self.wide + self.narrow // self.group


@dataclass(frozen=True)
class Fp4Record:
    """E2M1, the even channel in the low nibble, with a scale for each `group` channels.

    Fields:
        width: channels of an entry.
        fine: scales are e4m3, else powers of two.
        transformed: a normalized Hadamard transform comes first and stays: products of two such entries are the same.
    """

    width: int
    group: int
    fine: bool = False
    transformed: bool = False

    @property
    def bytes(self) -> int:
        return self.width // 2 + self.width // self.group

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """As `Record.encode`."""
        groups = (hadamard(values) if self.transformed else values).unflatten(-1, (-1, self.group))
        most = groups.abs().amax(-1)
        if self.fine:
            scales = (most / E2M1_MAX).clamp(LEAST_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
            factors, stored = scales.to(torch.float32), scales.view(torch.uint8)
        else:
            stored = next_e8m0(most.clamp_min(E2M1_MAX * 2.0**-126) / E2M1_MAX)
            factors = e8m0_values(stored)
        nibbles = to_e2m1(groups / factors[..., None]).flatten(-2)
        return _padded([nibbles[..., 0::2] | nibbles[..., 1::2] << 4, stored], self.bytes)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """As `Record.decode`; of transformed entries their transform."""
        codes, scales = stored.split([self.width // 2, self.width // self.group], dim=-1)
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=stored.device)
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        if self.fine:
            factors = scales.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
        else:
            factors = e8m0_values(scales)
        return (table[nibbles.long()].unflatten(-1, (-1, self.group)) * factors[..., None]).flatten(-2)


def _padded(parts: list[torch.Tensor], size: int) -> torch.Tensor:
    record = torch.cat(parts, dim=-1)
    return torch.nn.functional.pad(record, (0, size - record.shape[-1]))


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The normalized Walsh-Hadamard transform over the last dimension, a power of two."""
    width, y = x.shape[-1], x
    for size in (1 << bit for bit in range(width.bit_length() - 1)):
        pairs = y.unflatten(-1, (width // (2 * size), 2, size))
        a, b = pairs.unbind(-2)
        y = torch.stack([a + b, a - b], dim=-2).flatten(-3)
    return y * width**-0.5


def published_records(config: DeepseekConfig) -> dict[str, Record]:
    """The published records of a model: of "window", "entries" and "keys"."""
    width, rope = config.head_dim, config.qk_rope_head_dim
    if config.keys_from_latent:
        window: Record = Fp8Record(width, 32)
        entries: Record = Fp4Record(width, 16, fine=True)
    else:
        window = entries = Fp8Record(width, math.gcd(64, width - rope), rope)
    keys = Fp4Record(config.index_head_dim, 32, transformed=not config.keys_from_latent)
    return {"window": window, "entries": entries, "keys": keys}
