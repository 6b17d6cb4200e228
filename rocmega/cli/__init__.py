"""The command line. Nothing heavy is imported before a command runs: `rocmega --help` answers at once."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits. arguments: without the program's name; those of the process by default."""
    from rocmega.cli.app import app

    app(args=list(arguments) if arguments is not None else None, prog_name="rocmega")
