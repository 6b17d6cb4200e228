"""What the mega-tasks of all families have in common as units to compile: sizes, formats, model_config.h."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from rocmega.errors import ConfigError

ROWS = 16  # rows of a step: the free axis of the matrix tile
TILE_ROWS = 16  # outputs of a task
THREADS = 256  # of a block, on every target
SPLIT = 32  # entries of an attention task, as in hip/stages/attend.h and sink_attend.h

# Words of the large LDS array. One block owns its compute unit, so it may have nearly all: 64 KB on gfx942, 160 KB on
# gfx950, 227 KB on sm_90, less some 5 KB of small arrays. The CPU target is as tight as the tightest.
LDS_WORDS = {"host": 15168, "gfx942": 15168, "gfx950": 38912, "sm_90": 55296}

ZERO_WORDS = 128  # of it, as in hip/tile/lds.h

# Kernel type of a packed format (hip/tile/format.h), by the activations it meets.
FORMATS = {
    "f32": {"f32": "F32", "bf16": "F32", "fp8": "F32"},
    "bf16": {"f32": "Bf16Wide", "bf16": "Bf16", "fp8": "Bf16"},
    "fp8": {"f32": "Fp8Wide<false>", "bf16": "Fp8<false>", "fp8": "Fp8A8<false>"},
    "fp8_fnuz": {"f32": "Fp8Wide<true>", "bf16": "Fp8<true>", "fp8": "Fp8A8<true>"},
    "mxfp4": {"f32": "Mxfp4Wide", "bf16": "Mxfp4", "fp8": "Mxfp4A8"},
}


class Formats(Protocol):
    """What a family says of its formats: those of the big matrices, and of the experts."""

    @property
    def linear(self) -> str: ...

    @property
    def expert(self) -> str: ...


def router_slices(hidden: int) -> int:
    """In how many parts of k the router's products come, as in hip/stages/route.h."""
    return hidden // 1024 if hidden % 1024 == 0 else 8 if hidden % 256 == 0 else 1


def multiples(sizes: Mapping[str, int], of: int) -> Iterator[str]:
    """Faults of dimensions that are no multiples of `of`."""
    return (f"{name} {value} is not a multiple of {of}" for name, value in sizes.items() if value % of)


def check_formats(
    formats: Formats, target: str, activations: str, known: Mapping[str, Mapping[str, str]] = FORMATS
) -> None:
    """Raises ConfigError for matrices that no kernel type reads, with these activations on this target.

    known: as FORMATS, what the family has.
    """
    if unknown := sorted({formats.linear, formats.expert} - set(known)):
        raise ConfigError(
            f"The mega-task has no instructions for matrices in {', '.join(unknown)}: scales of 32x32 blocks, as a "
            "rank's part gets them where it begins inside a block of 128x128. Use the standard path, or fewer ranks."
        )
    without = sorted(format for format in {formats.linear, formats.expert} if activations not in known[format])
    if without:
        raise ConfigError(
            f"The mega-task has no {activations} activations for matrices in {', '.join(without)}. Use others, or the "
            "standard path."
        )
    native = {"gfx942": "fp8_fnuz", "gfx950": "fp8", "sm_90": "fp8"}.get(target, formats.linear)
    if activations == "fp8" and formats.linear.startswith("fp8") and formats.linear != native:
        raise ConfigError(
            f"FP8 activations meet weights in the FP8 of {target}'s instructions, {native}, and these are "
            f"{formats.linear}. Pack the checkpoint for {target} (rocmega pack), or use bf16 activations."
        )


def waves(target: str) -> int:
    """Of a block."""
    return 8 if target == "sm_90" else 4


def exact_attention(entry: int, words: int, target: str) -> Iterator[str]:
    """Where attention in float32 needs more LDS than `words`, as hip/stages/attend_tile.h lays it out.

    entry: channels of a query or cache entry.
    """
    attention = (16 + SPLIT) * (entry + 4) + waves(target) // 2 * 16 * SPLIT
    if attention > words:
        yield f"attention's queries and cache entries would take {attention} words of {words}"


def check_exact(faults: Iterator[str], target: str) -> None:
    """Raises ConfigError if float32 activations need more LDS than there is."""
    if found := list(faults):
        raise ConfigError(
            f"f32 activations of this model do not fit into {target}'s LDS: {'; '.join(found)}. Use the standard "
            "path, or bf16 activations."
        )


def variant(*, timeline: bool = False, many: bool = False, one_row: bool = False) -> tuple[str, dict[str, int]]:
    """What a unit's variants add to its name, and define.

    timeline: with stamps (hip/handoff/timeline.h). many: for launches of several tokens. one_row: for steps of one row.
    """
    defines = {"TIMELINE": timeline, "MANY_TOKENS": many, "MOST_ROWS": one_row}
    names = {"-timeline": timeline, "-many": many, "-row": one_row}
    return "".join(name for name, on in names.items() if on), {name: 1 for name, on in defines.items() if on}


def header_text(sizes: Mapping[str, int], numbers: Mapping[str, float], types: Mapping[str, str]) -> str:
    """The text of model_config.h, which decode.hip is compiled against."""
    return "\n".join(
        [
            "#pragma once",
            *(f"constexpr int {name} = {int(value)};" for name, value in sizes.items()),
            *(f"constexpr float {name} = {float(value)!r}f;" for name, value in numbers.items()),
            '#include "tile/tile.h"',
            *(f"using {name} = {value};" for name, value in types.items()),
            "",
        ]
    )
