"""`rocmega tune`: measure every path on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rocmega.errors import RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from rocmega.policy import Measured


def tune(
    directory: Path = typer.Argument(..., metavar="DIR", help="Checkpoint or pack, as for rocmega decode."),
    rows: str = typer.Option("1,2,4,8,16", help="How many requests a step has."),
    context: str = typer.Option("128,1024,4096", help="Tokens in each request's cache."),
    device: str = typer.Option("auto", help="auto, host, hip or cuda."),
    activations: str = typer.Option("auto", help="As for rocmega decode."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Time decode steps of the mega-task, the fused and the standard path; --path auto then takes the fastest."""
    from rocmega import tuning
    from rocmega.cli.output import console, print_json, progress
    from rocmega.policy import MEGA_ROWS
    from rocmega.runner import Runner

    counts, contexts = _numbers("--rows", rows, 1, MEGA_ROWS), _numbers("--context", context, 1, 1 << 20)
    with progress(quiet=json) as show:
        runner = Runner(
            directory,
            device=device,
            max_rows=max(counts),
            max_model_len=max(2, *contexts),
            activations=activations,
            progress=show,
        )
        try:
            cells = tuning.measure(runner, counts, contexts, show)
            file = tuning.save(runner, cells)
            where = runner.where
        finally:
            runner.close()
    if json:
        print_json({"where": where, "file": str(file), "cells": [vars(cell) for cell in cells]})
        return
    out = console()
    out.print(table(f"ms a step, medians, {where}", cells))
    out.print(f"Kept in {file}; path 'auto' runs each step by the path that was fastest.")


def _numbers(option: str, text: str, least: int, most: int) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < least or numbers[-1] > most:
        raise RequestError(f"{option} {text!r} is not a list of numbers from {least} to {most} such as 1,2,4.")
    return numbers


def table(title: str, cells: list[Measured]) -> Table:
    """Measurements for people."""
    from rich import box
    from rich.table import Table

    from rocmega.policy import PATHS

    made = Table("context", "rows", *PATHS, "fastest", title=title, box=box.SIMPLE_HEAD)
    for cell in cells:
        times = [(ms, path) for path in PATHS if (ms := cell.ms(path)) is not None]
        (best, name), (second, _) = sorted(times)[:2]
        shown = ["" if (ms := cell.ms(path)) is None else f"{ms:.3f}" for path in PATHS]
        made.add_row(str(cell.context), str(cell.rows), *shown, f"{name}, {second / best:.2f} times")
    return made
