"""`rocmega advise`: which path a step would take, and what speaks for either."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rocmega.errors import RequestError

if TYPE_CHECKING:
    from rocmega.policy import Measured

ROWS = (1, 2, 4, 8, 16)


def advise(
    model: str = typer.Option(..., help="A checkpoint, a pack, or a model by name, such as glm-5.2."),
    rows: int = typer.Option(1, min=1, help="Requests that decode together."),
    context: int = typer.Option(4096, min=1, help="Tokens of the longest of them."),
    arch: str = typer.Option("gfx950", help="host, gfx942, gfx950 or sm_90."),
    tensor_parallel_size: int = typer.Option(
        1, "--tensor-parallel-size", "--tp", min=1, help="How many GPUs share the model."
    ),
    sampling: bool = typer.Option(False, "--sampling", help="Not greedy."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Say which path runs such a step and why, what the step reads, and what was measured here."""
    from rocmega.cli.output import print_json

    found = _advice(model, rows, context, arch, tensor_parallel_size, sampling)
    if json:
        print_json(found)
    else:
        _print(found)


def _advice(model: str, rows: int, context: int, arch: str, tp: int, sampling: bool) -> dict[str, Any]:
    from rocmega import registry
    from rocmega.cli.packs import first_rank
    from rocmega.packing.traffic import BANDWIDTH, read_bytes
    from rocmega.policy import MEGA_ROWS, MEGA_TARGETS, StepShape, choose

    if arch not in MEGA_TARGETS:
        raise RequestError(f"--arch {arch!r}: choose one of {', '.join(sorted(MEGA_TARGETS))}.")
    about, fields = first_rank(model, None if arch == "host" else arch, tp)
    family = about["config"]["model_type"]
    config = registry.family_module(family, "config").from_dict(about["config"])
    formats = registry.family_module(family, "weights").Formats(**about["formats"])
    traffic = registry.family_module(family, "traffic")
    shape = StepShape(
        family=family,
        format=formats.label,
        target=arch,
        rows=rows,
        context=context,
        max_rows=MEGA_ROWS,
        max_model_len=config.max_position_embeddings,
        ranks=tp,
        features=frozenset({"sampling" if sampling else "greedy"}),
        activations="f32" if formats.label == "f32" else "bf16",
        fused_missing=(),  # as on a machine that has what either path needs
    )
    decision = choose(shape)
    cached = sum(traffic.cache_reads(config, formats, context).values())
    sizes = {count: sum(read_bytes(field, count) for field in fields) + count * cached for count in {*ROWS, rows}}
    return {
        "model": model,
        "arch": arch,
        "tensor_parallel_size": tp,
        "rows": rows,
        "context": context,
        "path": decision.path,
        "reasons": list(decision.reasons),
        "fused_reasons": list(decision.fused_reasons),
        "hand_offs": traffic.hand_offs(config, context),
        "bytes": {str(count): round(size) for count, size in sorted(sizes.items())},
        "least_ms": {name: sizes[rows] / bandwidth * 1e3 for name, bandwidth in BANDWIDTH.items()},
        "measured": _measured(model),
    }


def _measured(model: str) -> list[dict[str, Any]]:
    """What `rocmega tune` has left for a model of this name on this machine, whatever the device."""
    import json as reader

    from rocmega.tuning import folder

    out = []
    for file in sorted(folder().glob("*.json")):
        try:
            kept = reader.loads(file.read_text(encoding="utf-8"))
            if kept["model"] == str(Path(model).resolve()):
                out.append({"where": kept["where"], "cells": kept["cells"]})
        except (OSError, ValueError, KeyError):
            continue
    return out


def _print(found: dict[str, Any]) -> None:
    from rich.text import Text

    from rocmega.cli.output import console
    from rocmega.cli.tune import table
    from rocmega.policy import Measured

    out = console()
    step = f"{found['rows']} rows, {found['context']} tokens, {found['arch']}, --tp {found['tensor_parallel_size']}"
    out.print(Text(f"{found['model']}, {step}: the {found['path']} path."))
    for reason in found["reasons"]:
        out.print(Text(f"  not the mega-task: {reason}"))
    for reason in found["fused_reasons"]:
        out.print(Text(f"  not the fused path: {reason}"))
    sizes = ", ".join(f"{int(size) / 1e9:.3g} GB at {count}" for count, size in found["bytes"].items())
    limits = ", ".join(f"{name} {ms:.3g} ms" for name, ms in found["least_ms"].items())
    out.print(f"A step reads, of weights and caches, by rows: {sizes}.")
    out.print(f"By the data sheets' bandwidth that takes at least: {limits}.")
    out.print(
        f"{found['hand_offs']} stages wait for one another. All paths read the same bytes; beyond that the mega-task "
        f"pays {found['hand_offs']} hand-offs, the standard path at least as many borders between kernels, the fused "
        "path eleven of a graph in each layer. So no number of rows up to 16 is predicted where another path wins: it "
        "wins where a hand-off costs more than a border, or its matrix products are faster. That has to be measured."
    )
    if not found["measured"]:
        out.print("Nothing was measured here yet: rocmega tune DIR does.")
    for kept in found["measured"]:
        out.print(table(f"measured, ms a step, {kept['where']}", [Measured(**cell) for cell in kept["cells"]]))
        out.print(crossover([Measured(**cell) for cell in kept["cells"]]))


def crossover(cells: list[Measured]) -> str:
    """In words: from how many rows on another path was faster than the mega-task, for each context."""
    parts = []
    for context in sorted({cell.context for cell in cells}):
        there = [cell for cell in cells if cell.context == context]
        slower = [cell.rows for cell in there if cell.mega_ms > min(cell.standard_ms, cell.fused_ms or inf)]
        parts.append(f"{context} tokens: " + (f"from {min(slower)} rows on" if slower else "nowhere"))
    return "Another path was faster than the mega-task at " + "; ".join(parts) + "."
