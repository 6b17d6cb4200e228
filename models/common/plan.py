"""Plans to pack a model: what every family does alike."""

from __future__ import annotations

from rocmega.checkpoint.tiles import FORMATS, dtype_of
from rocmega.packing.plan import Field, Job, MatrixJob, PlainJob, Reads, banded_matrix, banded_rows


def packed_format(format: str, block: int, arch: str | None) -> str:
    """The packed format of matrices stored in `format`: FP8 in blocks of `block`, as the architecture has it."""
    if not format.startswith("fp8"):
        return format
    finer = "_32" if block < FORMATS[format].block else format.removeprefix("fp8")
    return f"fp8{finer}{'_fnuz' if arch == 'gfx942' else ''}"


class Builder:
    """Collects fields and jobs.

    Fields:
        prefix: of the fields' names, such as "layers.3."; source: of the tensors'. Set them before each layer.
        plus_zero: -0 of mxfp4 becomes +0.
    """

    def __init__(self, tp: int, plus_zero: bool):
        self.tp, self.plus_zero = tp, plus_zero
        self.fields: dict[str, Field] = {}
        self.jobs: list[Job] = []
        self.prefix = self.source = ""

    def embedding(self, format: str, vocab: int, hidden: int, source: str) -> None:
        """The embedding, row-major: every rank has all of it."""
        self.put(Field("embedding", format, (vocab, hidden), reads=Reads("rows")))
        copied = PlainJob("embedding", (source,), dtype_of(format))
        self.jobs += banded_rows(copied, vocab, hidden * dtype_of(format).itemsize)

    def vector(self, name: str, size: int, *sources: str) -> None:
        shape = (size,) if len(sources) == 1 else (len(sources), size)
        self.put(Field(self.prefix + name, "f32", shape))
        names = tuple(self.source + source for source in sources)
        self.jobs.append(PlainJob(self.prefix + name, names, dtype_of("f32")))

    def matrix(
        self,
        name: str,
        format: str,
        shape: tuple[int, int],
        *sources: str,
        cut: int | None = None,
        reads: Reads | None = None,
    ) -> None:
        """Matrices of one published shape, one after the other."""
        local = list(shape)
        if cut is not None:
            local[cut] //= self.tp
        split = cut is not None and self.tp > 1
        self.put(Field(self.prefix + name, format, tuple(local), len(sources), split, reads or Reads()))
        row_bytes = shape[1] * dtype_of(format).itemsize // FORMATS[format].numbers
        for index, source in enumerate(sources):
            whole = MatrixJob(
                self.prefix + name,
                index,
                self.source + source,
                shape,
                format,
                tp=self.tp,
                cut=cut if split else None,
                plus_zero=self.plus_zero,
            )
            self.jobs += banded_matrix(whole, row_bytes)

    def put(self, field: Field) -> None:
        self.fields[field.name] = field
