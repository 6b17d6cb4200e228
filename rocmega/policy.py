"""Which path runs a decode step: the mega-task, or the standard path in PyTorch.

`choose` is a pure function of the step's shape, so that every rank decides the same without talking. It denies by
default: the mega-task runs only what is listed here as supported, and a refusal lists every reason, not the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Path = Literal["mega", "standard"]

MEGA_FAMILIES = frozenset({"glm_moe_dsa"})
# Of the big matrices, and after a + of the experts where theirs is another. FNUZ is what packs for gfx942 hold.
MEGA_FORMATS = frozenset(
    {"f32", "bf16", "fp8", "fp8_fnuz"} | {f"{linear}+mxfp4" for linear in ("bf16", "fp8", "fp8_fnuz")}
)
MEGA_TARGETS = frozenset({"host", "gfx942", "gfx950", "sm_90"})
MEGA_ROWS = 16  # the free axis of a matrix tile
MEGA_FEATURES = frozenset({"greedy", "logits", "sampling", "drafts"})


@dataclass(frozen=True)
class Measured:
    """How long a step of `rows` rows took with `context` tokens in each cache, by either path, in milliseconds."""

    rows: int
    context: int
    mega_ms: float
    standard_ms: float


@dataclass(frozen=True)
class StepShape:
    """All that the choice may depend on; equal on every rank.

    `rows` requests advance by `tokens_per_row` tokens each; `context` is the longest of them after the step. `family`
    is the config's model_type, `format` that of the big matrices, `target` what kernels are compiled for, `features`
    what the step is asked to do. `missing` holds what the installation lacks (a compiler, a kernel), as sentences;
    `measured` what `rocmega tune` found on this machine.
    """

    family: str
    format: str
    target: str
    rows: int
    context: int
    max_rows: int
    max_model_len: int
    tokens_per_row: int = 1
    ranks: int = 1
    features: frozenset[str] = frozenset({"greedy"})
    missing: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The path of a step. `reasons` says why it is not the mega-task; empty if it is."""

    path: Path
    reasons: tuple[str, ...] = ()


def _listed(what: str, value: str, supported: frozenset[str]) -> str | None:
    return None if value in supported else f"{what} {value!r} is not one of {', '.join(sorted(supported))}"


def _family(shape: StepShape) -> str | None:
    if shape.family in MEGA_FAMILIES:
        return None
    return f"there is no mega-task for model family {shape.family!r}, only for {', '.join(sorted(MEGA_FAMILIES))}"


def _features(shape: StepShape) -> str | None:
    unknown = sorted(shape.features - MEGA_FEATURES)
    return f"the mega-task does not do: {', '.join(unknown)}" if unknown else None


def _tokens(shape: StepShape) -> str | None:
    if shape.tokens_per_row == 1:
        return None
    return f"{shape.tokens_per_row} tokens per row: prefill is the standard path's work"


def _rows(shape: StepShape) -> str | None:
    limit = min(shape.max_rows, MEGA_ROWS)
    return None if 1 <= shape.rows <= limit else f"{shape.rows} rows; the mega-task was built for 1 to {limit}"


def _context(shape: StepShape) -> str | None:
    if 1 <= shape.context <= shape.max_model_len:
        return None
    return f"a context of {shape.context} tokens; the mega-task was built for 1 to {shape.max_model_len}"


def _ranks(shape: StepShape) -> str | None:
    if shape.ranks > 1 and "sampling" in shape.features:
        return f"sampling on {shape.ranks} ranks: each has a part of the vocabulary, and a draw needs all of it"
    return None


def nearest(measured: Iterable[Measured], rows: int, context: int) -> Measured | None:
    """The measurement that stands for a step: the next larger one, in context first; else the largest."""
    cells = sorted(measured, key=lambda cell: (cell.context, cell.rows))
    contexts = [cell.context for cell in cells]
    at = next((length for length in contexts if length >= context), contexts[-1] if contexts else 0)
    there = [cell for cell in cells if cell.context == at]
    return next((cell for cell in there if cell.rows >= rows), there[-1] if there else None)


def _slower(shape: StepShape) -> str | None:
    cell = nearest(shape.measured, shape.rows, shape.context)
    if cell is None or cell.mega_ms <= cell.standard_ms:
        return None
    return (
        f"measured here with {cell.rows} rows and {cell.context} tokens: {cell.mega_ms:.3g} ms, and "
        f"{cell.standard_ms:.3g} ms by the standard path"
    )


RULES: tuple[Callable[[StepShape], str | None], ...] = (
    _family,
    lambda shape: _listed("weight format", shape.format, MEGA_FORMATS),
    lambda shape: _listed("target", shape.target, MEGA_TARGETS),
    _features,
    _tokens,
    _rows,
    _context,
    _ranks,
    _slower,
)


def choose(shape: StepShape) -> Decision:
    """The path for a step of this shape, with all reasons if it is not the mega-task."""
    reasons = shape.missing + tuple(reason for rule in RULES if (reason := rule(shape)) is not None)
    return Decision("standard", reasons) if reasons else Decision("mega")
