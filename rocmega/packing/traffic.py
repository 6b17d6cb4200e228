"""What a decode step reads, and how fast memory lets it be: the numbers of `rocmega inspect PACK`.

Counting rules: each byte of a matrix that the step needs is read once, padding and scales included; of the routed
experts of a layer, those that at least one of M rows chose, E * (1 - (1 - k / E)^M) of E if rows choose k at random; of
the embedding and other tables, the rows that M tokens look up; the cache once for each row. Hand-offs, activations and
second reads are not counted, nor is a layer for guessing ahead, so the times are limits that no implementation passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rocmega.packing.plan import DRAFT, Field

# Peak memory bandwidth in bytes per second, from the makers' data sheets: AMD Instinct MI300X (HBM3, 5.3 TB/s), AMD
# Instinct MI355X (HBM3E, 8 TB/s), NVIDIA H200 (HBM3e, 4.8 TB/s). What can be measured is less.
BANDWIDTH = {"MI300X": 5.3e12, "MI355X": 8.0e12, "H200": 4.8e12}
ROWS = (1, 4, 8)


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """How many of `experts` at least one of `rows` rows chooses, on average, if each chooses `chosen` at random."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def read_bytes(field: Field, rows: int) -> float:
    """Bytes of a field that a step of `rows` rows reads."""
    if field.name.startswith(DRAFT):
        return 0
    reads = field.reads
    if reads.kind == "rows":
        return rows * max(1, reads.chosen) * field.bytes() / field.shape[0]
    if reads.kind == "experts":
        of_one = field.bytes() / (reads.experts + reads.always)
        return of_one * (distinct_experts(reads.experts, reads.chosen, rows) + reads.always)
    return field.bytes()


@dataclass(frozen=True)
class Line:
    """Fields of one kind, of all layers together.

    Fields:
        name: without the layer.
        format: of all of them.
        shape: of one matrix of one rank, padding not counted.
        matrices: how many, 0 for plain tensors.
        layers: in how many layers.
        bytes: what the rank holds.
        reads: rows of a step -> bytes that it reads.
        split: whether ranks hold different parts.
        host: it is in host memory.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    matrices: int
    layers: int
    bytes: int
    reads: dict[int, float]
    split: bool
    host: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape), "reads": {str(m): round(n) for m, n in self.reads.items()}}


def lines(fields: Iterable[Field]) -> list[Line]:
    """The fields, those of a kind together, in their order."""
    groups: dict[tuple[Any, ...], list[Field]] = {}
    for field in fields:
        name = field.name if field.name.startswith(DRAFT) else field.name.rsplit(".", 1)[-1]
        key = (name, field.format, field.shape, field.count)
        groups.setdefault(key, []).append(field)
    return [
        Line(
            name,
            format,
            shape,
            count * len(of),
            len(of),
            sum(field.bytes() for field in of),
            {rows: sum(read_bytes(field, rows) for field in of) for rows in ROWS},
            of[0].split,
            of[0].host,
        )
        for (name, format, shape, count), of in groups.items()
    ]


@dataclass(frozen=True)
class Traffic:
    """What one rank holds and reads.

    Fields:
        lines: its weights.
        cache: name -> bytes that one row reads of the cache at `context` tokens.
        context: tokens in each row's cache.
    """

    lines: list[Line]
    cache: dict[str, int]
    context: int

    @property
    def bytes(self) -> int:
        """Weights that the rank holds on its device."""
        return sum(line.bytes for line in self.lines if not line.host)

    @property
    def host_bytes(self) -> int:
        """Weights that it reads from host memory, which ranks of one machine may share."""
        return sum(line.bytes for line in self.lines if line.host)

    def step(self, rows: int) -> float:
        """Bytes that a step of `rows` rows reads."""
        return sum(line.reads[rows] for line in self.lines) + rows * sum(self.cache.values())

    def limits(self) -> list[dict[str, Any]]:
        """Per device and number of rows, the least time of a step and the most tokens a second of all rows together."""
        out = []
        for device, bandwidth in BANDWIDTH.items():
            for rows in ROWS:
                seconds = self.step(rows) / bandwidth
                entry = {"device": device, "bandwidth": bandwidth, "rows": rows, "ms": seconds * 1e3}
                out.append({**entry, "tokens_per_second": rows / seconds})
        return out

    def to_json(self) -> dict[str, Any]:
        steps = {str(rows): round(self.step(rows)) for rows in ROWS}
        return {
            "bytes": self.bytes,
            "host_bytes": self.host_bytes,
            "context": self.context,
            "tensors": [line.to_json() for line in self.lines],
            "cache_reads_per_row": self.cache,
            "bytes_read_per_step": steps,
            "bytes_read_per_token": {rows: round(size / int(rows)) for rows, size in steps.items()},
            "limits": self.limits(),
        }
