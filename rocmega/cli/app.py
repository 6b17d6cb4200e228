"""The commands, and what they have in common: how errors look."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from rocmega.cli import (
    advise,
    build,
    check,
    compare,
    decode,
    demo,
    doctor,
    evaluate,
    inspect,
    pack,
    selftest,
    serve,
    tune,
)
from rocmega.errors import RocmegaError

FAILED = 2


class Commands(TyperGroup):
    """Prints a RocmegaError as the paragraph it is, on stderr, and exits with code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RocmegaError as error:
            print(f"rocmega: {error}", file=sys.stderr)
            raise typer.Exit(FAILED) from None
        except BrokenPipeError:
            sys.stderr.close()  # the reader of our output has gone: no second complaint at exit
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    help="Decode language models with one persistent kernel per step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(decode.decode)
app.command(context_settings=compare.SETTINGS)(compare.compare)
app.command("eval")(evaluate.evaluate)
app.command()(serve.serve)
app.command()(advise.advise)
app.command()(tune.tune)
app.command()(pack.pack)
app.command()(check.check)
app.command()(build.build)
app.command()(doctor.doctor)
app.command(context_settings=compare.SETTINGS)(selftest.selftest)
app.command()(inspect.inspect)


def _print_version(wanted: bool) -> None:
    if wanted:
        from rocmega import __version__

        print(f"rocmega {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass
