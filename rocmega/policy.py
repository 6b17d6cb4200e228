"""Which path runs a decode step: the mega-task, fused Triton kernels in a graph, or the standard path in PyTorch.

`choose` is a pure function of the step's shape, so that every rank decides the same without talking. It denies by
default: the mega-task and the fused path run only what is listed here as supported, and a refusal lists every reason,
not the first. Of the paths that can run a step, the first of PATHS does, unless a later one was measured to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

StepPath = Literal["mega", "fused", "standard"]
PATHS: tuple[StepPath, ...] = ("mega", "fused", "standard")  # the last runs everything

MEGA_FAMILIES = frozenset({"glm_moe_dsa", "deepseek_v4", "deepseek_v41"})
# A token changes the state of a request for good: no guesses, and one token of a request in a step.
STATEFUL_FAMILIES = frozenset({"deepseek_v4", "deepseek_v41"})
# Of the big matrices, and after a + of the experts where theirs is another. FNUZ is what packs for gfx942 hold.
MEGA_FORMATS = frozenset(
    {"f32", "bf16", "fp8", "fp8_fnuz"} | {f"{linear}+mxfp4" for linear in ("bf16", "fp8", "fp8_fnuz")}
)
# Scales of 32x32 blocks, which the mega-task of these families reads: theirs are powers of two.
FINE_FAMILIES = frozenset({"deepseek_v4", "deepseek_v41"})
FINE_FORMATS = frozenset({"fp8_32", "fp8_32_fnuz", "fp8_32+mxfp4", "fp8_32_fnuz+mxfp4"})
MEGA_TARGETS = frozenset({"host", "gfx942", "gfx950", "sm_90"})
MEGA_ROWS = 16  # the free axis of a matrix tile
MEGA_FEATURES = frozenset({"greedy", "logits", "sampling", "drafts", "residual"})

# Of the fused path, whose free axis is the same.
FUSED_FAMILIES = frozenset({"glm_moe_dsa"})
FUSED_FORMATS = MEGA_FORMATS
FUSED_FEATURES = MEGA_FEATURES - {"residual"}
FUSED_TARGETS = frozenset({"gfx942", "gfx950", "sm_90"})  # Triton's interpreter is for tests


NOT_LOADED = ("it has not been loaded",)


@dataclass(frozen=True)
class Measured:
    """How long a step of `rows` rows took with `context` tokens in each cache, in milliseconds.

    fused_ms: None where there was no fused path.
    """

    rows: int
    context: int
    mega_ms: float
    standard_ms: float
    fused_ms: float | None = None

    def ms(self, path: StepPath) -> float | None:
        """By one path, if it was measured."""
        return {"mega": self.mega_ms, "fused": self.fused_ms, "standard": self.standard_ms}[path]


@dataclass(frozen=True)
class StepShape:
    """All that the choice may depend on; equal on every rank.

    `rows` requests advance by `tokens_per_row` tokens each; `context` is the longest of them after the step. `family`
    is the config's model_type, `format` that of the big matrices, `target` what kernels are compiled for, `features`
    what the step is asked to do, `activations` what weights meet. `missing` holds what the mega-task lacks here (a
    compiler, a kernel), as sentences, `fused_missing` what the fused path does; `measured` what `rocmega tune` found on
    this machine.
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
    activations: str = "bf16"
    missing: tuple[str, ...] = ()
    fused_missing: tuple[str, ...] = NOT_LOADED
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The path of a step.

    `reasons` says why it is not the mega-task, `fused_reasons` why, then, it is not the fused path either; both are
    empty if it is the mega-task.
    """

    path: StepPath
    reasons: tuple[str, ...] = ()
    fused_reasons: tuple[str, ...] = ()


def _listed(what: str, value: str, supported: frozenset[str]) -> str | None:
    return None if value in supported else f"{what} {value!r} is not one of {', '.join(sorted(supported))}"


def _family(shape: StepShape) -> str | None:
    if shape.family in MEGA_FAMILIES:
        return None
    return f"there is no mega-task for model family {shape.family!r}, only for {', '.join(sorted(MEGA_FAMILIES))}"


def _mega_format(shape: StepShape) -> str | None:
    fine = FINE_FORMATS if shape.family in FINE_FAMILIES else frozenset()
    return _listed("weight format", shape.format, MEGA_FORMATS | fine)


def _mega_features(shape: StepShape) -> str | None:
    supported = MEGA_FEATURES
    if shape.family in STATEFUL_FAMILIES:
        supported -= {"drafts", "residual"} | ({"sampling"} if shape.ranks > 1 else set())
    return _features(shape, supported)


def _features(shape: StepShape, supported: frozenset[str]) -> str | None:
    unknown = sorted(shape.features - supported)
    return f"it does not do: {', '.join(unknown)}" if unknown else None


def _tokens(shape: StepShape) -> str | None:
    if shape.tokens_per_row == 1:
        return None
    return f"{shape.tokens_per_row} tokens per row: prefill is the standard path's work"


def _rows(shape: StepShape) -> str | None:
    limit = min(shape.max_rows, MEGA_ROWS)
    return None if 1 <= shape.rows <= limit else f"{shape.rows} rows; kernels were built for 1 to {limit}"


def _context(shape: StepShape) -> str | None:
    if 1 <= shape.context <= shape.max_model_len:
        return None
    return f"a context of {shape.context} tokens; kernels were built for 1 to {shape.max_model_len}"


def _rounded(shape: StepShape) -> str | None:
    wanted = "f32" if shape.format == "f32" else "bf16"
    if shape.activations == wanted:
        return None
    return f"activations {shape.activations!r}; with {shape.format} weights it has {wanted}"


def nearest(measured: Iterable[Measured], rows: int, context: int) -> Measured | None:
    """The measurement that stands for a step: the next larger one, in context first; else the largest."""
    cells = sorted(measured, key=lambda cell: (cell.context, cell.rows))
    contexts = [cell.context for cell in cells]
    at = next((length for length in contexts if length >= context), contexts[-1] if contexts else 0)
    there = [cell for cell in cells if cell.context == at]
    return next((cell for cell in there if cell.rows >= rows), there[-1] if there else None)


def _slower(shape: StepShape, path: StepPath, others: Iterable[StepPath]) -> str | None:
    cell = nearest(shape.measured, shape.rows, shape.context)
    mine = None if cell is None else cell.ms(path)
    if cell is None or mine is None:
        return None
    times = [(ms, other) for other in others if (ms := cell.ms(other)) is not None]
    if not times or mine <= min(times)[0]:
        return None
    best, name = min(times)
    return (
        f"measured here with {cell.rows} rows and {cell.context} tokens: {mine:.3g} ms, and {best:.3g} ms by the "
        f"{name} path"
    )


Rules = tuple[Callable[[StepShape], str | None], ...]
MEGA_RULES: Rules = (
    _family,
    _mega_format,
    lambda shape: _listed("target", shape.target, MEGA_TARGETS),
    _mega_features,
    _tokens,
    _rows,
    _context,
)
FUSED_RULES: Rules = (
    lambda shape: _listed("model family", shape.family, FUSED_FAMILIES),
    lambda shape: _listed("weight format", shape.format, FUSED_FORMATS),
    lambda shape: _listed("target", shape.target, FUSED_TARGETS),
    _rounded,
    lambda shape: _features(shape, FUSED_FEATURES),
    _tokens,
    _rows,
    _context,
    lambda shape: None if shape.ranks == 1 else f"{shape.ranks} ranks: it does not sum their shares",
)


def refusals(shape: StepShape, path: StepPath) -> tuple[str, ...]:
    """All reasons why a path cannot run a step, whatever was measured; none if it can."""
    if path == "standard":
        return ()
    missing, rules = (shape.missing, MEGA_RULES) if path == "mega" else (shape.fused_missing, FUSED_RULES)
    return missing + tuple(reason for rule in rules if (reason := rule(shape)) is not None)


def choose(shape: StepShape) -> Decision:
    """The path for a step of this shape, with all reasons why it is not one before it."""
    mega, fused = refusals(shape, "mega"), refusals(shape, "fused")
    slower = _slower(shape, "mega", ("standard",) if fused else ("fused", "standard"))
    mega += () if slower is None else (slower,)
    if not mega:
        return Decision("mega")
    slower = _slower(shape, "fused", ("standard",))
    fused += () if slower is None else (slower,)
    return Decision("standard" if fused else "fused", mega, fused)
