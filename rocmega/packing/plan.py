"""What a pack consists of: fields, as one rank holds them, and jobs, which make them from a checkpoint's tensors.

A model family writes the plan (`models/<family>/plan.py`); packing into memory and packing into files both carry it
out. A job reads some rows of one tensor, and gives each rank its part of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rocmega.checkpoint import tiles
from rocmega.checkpoint.header import DTYPES
from rocmega.checkpoint.layouts import StoredMatrix, read_matrix
from rocmega.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from rocmega.checkpoint import Checkpoint

BAND_BYTES = 64 << 20  # larger tensors are read in bands of rows of about this size: it bounds the memory of packing
BAND_ROWS = tiles.SCALE_BLOCK  # a band's rows are a multiple of this: whole tiles, whole blocks of scales
ARCHS = ("host", "gfx942", "gfx950", "sm_90")
DRAFT = "draft."  # begins the names of the fields of a layer for guessing ahead: a pack may hold one, no step reads it


@dataclass(frozen=True)
class Reads:
    """What of a field a decode step reads: all of it, the rows of its tokens, or the experts that they chose.

    Fields:
        kind: "all", "rows" or "experts".
        experts: routed experts in the field, of which a token chooses `chosen`; `always` more are read by every token.
        chosen: of rows, how many a token looks up; 0 counts as 1.
    """

    kind: str = "all"
    experts: int = 0
    chosen: int = 0
    always: int = 0


@dataclass(frozen=True)
class Field:
    """A field of a pack, as one rank holds it.

    Fields:
        name: "layers.3.gate_up", for one.
        format: of packed matrices (tiles.FORMATS), or of a plain tensor (PLAIN).
        shape: [n, k] of one matrix; or of the plain tensor.
        count: how many matrices, one after the other; 0 for a plain tensor.
        split: whether ranks hold different parts.
        reads: what a decode step reads of it.
        host: it stays in host memory, whatever device the rest is on.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    count: int = 0
    split: bool = False
    reads: Reads = field(default_factory=Reads)
    host: bool = False

    def dtype(self) -> torch.dtype:
        """Of a plain tensor's values."""
        import torch

        return getattr(torch, DTYPES[PLAIN[self.format]][0])

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor name -> (safetensors dtype, shape): a plain tensor by the field's name, or its tiles and scales."""
        if not self.count:
            return {self.name: (PLAIN[self.format], self.shape)}
        n, k = self.shape
        grid = (self.count, *tiles.tile_grid(self.format, n, k), tiles.TILE_BYTES)
        out: dict[str, tuple[str, tuple[int, ...]]] = {f"{self.name}.tiles": ("U8", grid)}
        scales = tiles.scale_shape(self.format, n, k)
        if scales is not None:
            dtype = "U8" if self.format == "mxfp4" else "F32"
            out[f"{self.name}.scales"] = (dtype, (self.count, *scales[1]))
        return out

    def bytes(self) -> int:
        """Bytes in memory."""
        return sum(prod(shape) * ITEMSIZE[dtype] for dtype, shape in self.tensors().values())

    def to_json(self) -> dict[str, Any]:
        """For the manifest; `field_from_json` is the inverse."""
        out: dict[str, Any] = {"format": self.format, "shape": list(self.shape), "count": self.count}
        return out | {"split": self.split, "reads": vars(self.reads)} | ({"host": True} if self.host else {})


def field_from_json(name: str, entry: dict[str, Any]) -> Field:
    """A field of a manifest. KeyError or TypeError if it is damaged."""
    shape = tuple(int(size) for size in entry["shape"])
    return Field(
        name, entry["format"], shape, entry["count"], entry["split"], Reads(**entry["reads"]), entry.get("host", False)
    )


PLAIN = {"f32": "F32", "bf16": "BF16", "i32": "I32", "u8": "U8"}  # formats of plain tensors, as safetensors calls them
ITEMSIZE = {"U8": 1, "BF16": 2, "F32": 4, "I32": 4}


@dataclass(frozen=True)
class Made:
    """A part of a field, for one or more ranks that hold the same.

    Fields:
        ranks: who holds it.
        field: its name.
        index: of the matrix in the field; 0 for plain tensors.
        row: of the matrix or plain tensor, as the rank has it, where the part begins; a multiple of 16.
        value: rows of a matrix in the field's format, or of the plain tensor in its dtype.
    """

    ranks: tuple[int, ...]
    field: str
    index: int
    row: int
    value: StoredMatrix | torch.Tensor


class Job(Protocol):
    """Makes parts of fields. Its place in the plan is its name in the journal."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The checkpoint's tensors that it reads, scales not counted."""

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The only ranks that it is for, if not for all."""

    @property
    def field(self) -> str:
        """A field that it makes a part of. All its parts belong to the same layer, or to none."""

    def run(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> Iterator[Made]:
        """Its parts for these ranks. Raises CheckpointError as `read_matrix` does."""


@dataclass(frozen=True)
class MatrixJob:
    """Packs one matrix, or some rows of it, as they are stored.

    Fields:
        field, index: where it goes.
        source: the tensor.
        shape: of the whole matrix.
        format: of the field.
        tp: how many ranks share it.
        cut: the axis that they share: 0, 1, or None if each has all of it.
        rows: only these of the source. With cut 0 they belong to one rank.
        ranks: see Job.
        plus_zero: -0 of mxfp4 becomes +0.
    """

    field: str
    index: int
    source: str
    shape: tuple[int, int]
    format: str
    tp: int = 1
    cut: int | None = None
    rows: tuple[int, int] | None = None
    ranks: tuple[int, ...] | None = None
    plus_zero: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def run(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> Iterator[Made]:
        if self.cut == 0:
            yield from self._split_rows(checkpoint, ranks)
            return
        matrix, row = self._read(checkpoint, self.rows), self.rows[0] if self.rows else 0
        if self.cut is None:
            yield Made(tuple(ranks), self.field, self.index, row, matrix)
            return
        width = self.shape[1] // self.tp
        for rank in ranks:
            yield Made((rank,), self.field, self.index, row, matrix.columns(rank * width, (rank + 1) * width))

    def _split_rows(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> Iterator[Made]:
        height = self.shape[0] // self.tp
        if self.rows is not None:
            [rank] = self.ranks or ()
            yield Made((rank,), self.field, self.index, self.rows[0] - rank * height, self._read(checkpoint, self.rows))
            return
        whole = self._read(checkpoint, None) if len(ranks) > 1 else None
        for rank in ranks:
            rows = (rank * height, (rank + 1) * height)
            part = whole.rows(*rows) if whole is not None else self._read(checkpoint, rows)
            yield Made((rank,), self.field, self.index, 0, part)

    def _read(self, checkpoint: Checkpoint, rows: tuple[int, int] | None) -> StoredMatrix:
        """In the field's format: a finer grid of scales may be what makes cutting possible."""
        matrix = read_matrix(checkpoint, self.source, rows, self.format)
        if self.plus_zero and matrix.layout == "mxfp4":
            return StoredMatrix("mxfp4", tiles.without_negative_zero(matrix.values), matrix.scales)
        return matrix


@dataclass(frozen=True)
class PlainJob:
    """Copies tensors of one shape, stacked if there are several, or some rows of one; every rank has all of them."""

    field: str
    sources: tuple[str, ...]
    dtype: torch.dtype
    rows: tuple[int, int] | None = None
    ranks: tuple[int, ...] | None = None

    def run(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> Iterator[Made]:
        import torch

        values = [checkpoint.read(source, self.rows).to(self.dtype) for source in self.sources]
        value = values[0] if len(values) == 1 else torch.stack(values)
        yield Made(tuple(ranks), self.field, 0, self.rows[0] if self.rows else 0, value)


@dataclass(frozen=True)
class Plan:
    """Everything of one packed model.

    Fields:
        formats: what is stored in which format, by the family's names.
        arch: what it is packed for; None: as published, for whoever reads it.
        tp: number of ranks.
        fields: as each rank holds them.
        jobs: what makes them.
    """

    formats: dict[str, str]
    arch: str | None
    tp: int
    fields: dict[str, Field]
    jobs: list[Job]


def banded_matrix(whole: MatrixJob, row_bytes: int) -> list[MatrixJob]:
    """The job of one matrix, or several of bands of its rows if it is large."""
    n = whole.shape[0]
    if n * row_bytes <= BAND_BYTES:
        return [whole]
    if whole.cut != 0:
        return [replace_rows(whole, rows) for rows in _bands(0, n, row_bytes)]
    height = n // whole.tp
    return [
        replace_rows(whole, rows, (rank,))
        for rank in range(whole.tp)
        for rows in _bands(rank * height, (rank + 1) * height, row_bytes)
    ]


class RowsJob(Job, Protocol):
    """A job that can be cut: a dataclass with rows, None for all."""

    @property
    def rows(self) -> tuple[int, int] | None: ...


Rows = TypeVar("Rows", bound=RowsJob)


def banded_rows(whole: Rows, n: int, row_bytes: int) -> list[Rows]:
    """The job of one plain tensor, or several of bands of its rows if it is large."""
    if n * row_bytes <= BAND_BYTES:
        return [whole]
    return [replace(whole, rows=rows) for rows in _bands(0, n, row_bytes)]  # type: ignore[type-var]


def replace_rows(job: MatrixJob, rows: tuple[int, int], ranks: tuple[int, ...] | None = None) -> MatrixJob:
    """The same job for some rows alone."""
    return replace(job, rows=rows, ranks=ranks)


def _bands(start: int, stop: int, row_bytes: int) -> list[tuple[int, int]]:
    height = max(BAND_ROWS, BAND_BYTES // row_bytes // BAND_ROWS * BAND_ROWS)
    return [(row, min(row + height, stop)) for row in range(start, stop, height)]


def divide(sizes: dict[str, int], tp: int) -> None:
    """Raises ConfigError, naming every dimension that cannot be shared evenly by `tp` ranks."""
    faults = [f"{name} {size}" for name, size in sizes.items() if size % tp]
    if faults:
        largest = [parts for parts in range(2, tp) if not any(size % parts for size in sizes.values())]
        possible = f"{', '.join(map(str, largest))} ranks would do" if largest else "Use one rank"
        raise ConfigError(f"{tp} ranks cannot share this model evenly: {'; '.join(faults)}. {possible}.")


def finest_block(sizes: dict[str, int], tp: int, block: int) -> int:
    """Rows and columns of the FP8 scale blocks that a pack for `tp` ranks has: `block` as stored, or 32.

    sizes: every dimension that is cut. A part that begins inside a block of 128 and ends outside has no grid of
    128x128; with 32x32 it may have one, and repeating scales is exact. Raises ConfigError, naming the dimensions, where
    even that does not fit.
    """
    from rocmega.checkpoint.layouts import divides

    if tp == 1:
        return block
    for candidate in dict.fromkeys((block, 32)):
        faults = [f"{name} {size}" for name, size in sizes.items() if not divides(size, tp, candidate)]
        if not faults:
            return candidate
    raise ConfigError(
        f"With {tp} ranks the parts of {', '.join(faults)} begin and end inside blocks of FP8 scales, even if "
        "those are divided into 32x32. Use fewer ranks, or a bf16 checkpoint."
    )
