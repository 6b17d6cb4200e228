"""`rocmega selftest`: its arguments are those of `python -m rocmega.selftest`, which can do without typer."""

from __future__ import annotations

import typer


def selftest(context: typer.Context) -> None:
    """Check this device and the mega-task on it, and write a report for a bug report."""
    from rocmega.selftest.command import command

    command(context.args)
