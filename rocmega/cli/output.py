"""What commands print: tables and progress for people, one JSON object for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: Any) -> None:
    """The only thing that a command prints on stdout with --json."""
    print(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False))


def console() -> Console:
    """Where tables for people go."""
    from rich.console import Console

    return Console(highlight=False)


class _Lines:
    """Progress where stderr is a file: one line for each piece of work, as it begins."""

    def __init__(self) -> None:
        self.last = ""

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        if text != self.last:
            print(f"{text} ...", file=sys.stderr, flush=True)
        self.last = text


@contextmanager
def progress(quiet: bool = False, in_bytes: bool = False) -> Iterator[Progress]:
    """Bars on stderr that vanish when the work is done; lines where stderr is no terminal; nothing if quiet.

    in_bytes: what is counted are bytes; the bar then shows speed and time left.
    """
    if quiet or not sys.stderr.isatty() or find_spec("rich") is None:  # `rocmega.compare` does without rich
        yield silent if quiet else _Lines()
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(*_columns(in_bytes), console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(text: str, done: int = 0, total: int = 0) -> None:
            for other in [other for other in tasks if other != text]:
                bars.remove_task(tasks.pop(other))
            if text not in tasks:
                tasks[text] = bars.add_task(text, total=total or None)
            bars.update(tasks[text], completed=done, total=total or None)

        yield show


def _columns(in_bytes: bool) -> list[Any]:
    from rich import progress as rich

    counts = [rich.DownloadColumn(), rich.TransferSpeedColumn()] if in_bytes else [rich.MofNCompleteColumn()]
    times = [rich.TimeElapsedColumn(), *([rich.TextColumn("left"), rich.TimeRemainingColumn()] if in_bytes else [])]
    return [rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(), *counts, *times]
