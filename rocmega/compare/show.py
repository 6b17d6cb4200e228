"""A report on the terminal: by rich where it is installed, else as plain columns."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rocmega import timeline
from rocmega.compare.report import HEADER, Report


def show(report: Report) -> None:
    """Prints the table and what has to be said with it on stdout."""
    try:
        from rich import box
        from rich.table import Table
    except ImportError:
        print("rich is not installed: plain text.", file=sys.stderr)
        print(plain(report))
        return
    from rocmega.cli.output import console

    out = console()
    for label in report.labels():
        out.print(label, markup=False)
    for title, header, lines in _tables(report):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
        for number, name in enumerate(header):
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for line in lines:
            table.add_row(*line)
        out.print(table)
    for note in report.notes():
        out.print(note, markup=False)


def plain(report: Report) -> str:
    """The same without any library."""
    out = report.labels()
    for title, header, lines in _tables(report):
        out += ["", title, *_columns([header, *lines])]
    return "\n".join([*out, "", *report.notes()])


def _columns(cells: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([text.rjust(width) for text, width in zip(line, widths, strict=True)] for line in cells)
    return ["  ".join([line[0].ljust(widths[0]), *rest[1:]]).rstrip() for line, rest in zip(cells, padded, strict=True)]


def _tables(report: Report) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    for title, lines in report.tables():
        yield title, HEADER, lines
    apart = report.timeline
    if apart is not None:
        yield apart.title(), timeline.HEADER, timeline.cells(apart.stages, apart.timeline.layers)
