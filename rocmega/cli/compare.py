"""`rocmega compare`: its arguments are those of `python -m rocmega.compare`, which can do without typer."""

from __future__ import annotations

import typer

SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def compare(context: typer.Context) -> None:
    """Time decode steps of the mega-task beside the standard path, each judged against float32 first."""
    from rocmega.compare.command import command

    command(context.args)
