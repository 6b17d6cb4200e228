"""What weights meet: how exact activations are when they enter a product with a big matrix.

    f32    as they are. To compare with: every number of the checkpoint counts as published, nothing is rounded.
    bf16   rounded to bf16, 8 bits.
    fp8    rounded to bf16, and then where the matrix is quantized to FP8, 4 bits, with a scale per 128 (FP8 weights) or
           32 (MXFP4). Published FP8 checkpoints mean this by `activation_scheme: dynamic`.

By default float32 weights meet f32 and all others bf16. A decode step reads the same bytes of weights in bf16 and in
fp8, which is what bounds its time; fp8 saves the widening of weights in registers, and rounds 16 times as coarsely.
"""

from __future__ import annotations

from typing import Protocol

from rocmega.errors import RequestError

ACTIVATIONS = ("f32", "bf16", "fp8")


class Formats(Protocol):
    """What a family says of its formats: those of the big matrices, and of the cache, which activations meet too."""

    @property
    def linear(self) -> str: ...

    @property
    def expert(self) -> str: ...

    @property
    def cache(self) -> str: ...

    @property
    def label(self) -> str: ...


def choose(formats: Formats, asked: str = "auto") -> str:
    """One of ACTIVATIONS for weights packed in these formats; asked: one of them, or "auto" for the default.

    Raises RequestError for what these weights cannot do.
    """
    if asked not in ("auto", *ACTIVATIONS):
        raise RequestError(f"activations={asked!r}: choose one of auto, {', '.join(ACTIVATIONS)}.")
    chosen = asked if asked != "auto" else "f32" if formats.cache == "f32" else "bf16"
    if formats.linear == "f32" and chosen != "f32":
        raise RequestError(
            f"activations={asked!r}: this checkpoint is float32, whose products are float32. Leave it out."
        )
    if chosen == "f32" and formats.cache != "f32":
        raise RequestError(
            "activations='f32' needs attention's matrices and cache in float32, and this pack has them in bf16. Load "
            "the checkpoint itself, which is then packed in memory, or choose 'bf16' or 'fp8'."
        )
    if chosen != "f32" and formats.cache == "f32":
        raise RequestError(
            f"activations={asked!r}: these weights are packed for f32 activations. Pack them for {asked}."
        )
    if chosen == "fp8" and not any(kind.startswith(("fp8", "mxfp4")) for kind in (formats.linear, formats.expert)):
        raise RequestError(
            f"activations='fp8' is for quantized weights, FP8 or MXFP4, and these are {formats.label}. Choose 'bf16'."
        )
    return chosen
