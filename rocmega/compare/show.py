"""A report on the terminal: by rich where it is installed, else as plain columns."""

from __future__ import annotations

import sys

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
    for title, lines in report.tables():
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
        for number, name in enumerate(HEADER):
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for line in lines:
            table.add_row(*line)
        out.print(table)
    for note in report.notes():
        out.print(note, markup=False)


def plain(report: Report) -> str:
    """The same without any library."""
    tables = report.tables()
    cells = [HEADER, *(line for _, lines in tables for line in lines)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(HEADER))]

    def columns(line: tuple[str, ...]) -> str:
        padded = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *padded[1:]]).rstrip()

    out = report.labels()
    for title, lines in tables:
        out += ["", title, columns(HEADER), *map(columns, lines)]
    return "\n".join([*out, "", *report.notes()])
