"""The command: what `rocmega selftest` and `python -m rocmega.selftest` both do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rocmega.errors import RequestError, RocmegaError

if TYPE_CHECKING:
    from rocmega.selftest.report import Report

FAILED = 1  # exit code
COLORS = {"ok": "green", "skipped": "yellow", "failed": "red"}


def command(arguments: Sequence[str]) -> None:
    """Runs the checks and prints what they found. Exits with 1 if any failed. Raises as `selftest` does."""
    given = _parser().parse_args(list(arguments))
    if given.report is not None and not given.report.absolute().parent.is_dir():
        raise RequestError(f"--report {given.report}: its folder does not exist.")
    from rocmega.cli.output import print_json, progress
    from rocmega.selftest import selftest

    with progress(quiet=given.json) as tell:
        report = selftest(given.device, soak=given.soak, file=given.report, progress=tell)
    if given.json:
        print_json(report.to_json())
    else:
        _show(report, given.report)
    if not report.passed:
        sys.exit(FAILED)


def main() -> None:
    """`python -m rocmega.selftest`: the command where typer is not installed."""
    try:
        command(sys.argv[1:])
    except RocmegaError as error:
        print(f"rocmega: {error}", file=sys.stderr)
        sys.exit(2)


def _show(report: Report, file: Path | None) -> None:
    try:
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(report.text(), end="")
        return
    from rocmega.cli.output import console

    table = Table("check", "", "s", "what was seen", title=_title(report), title_justify="left")
    for result in report.results:
        state = f"[{COLORS[result.state]}]{result.state}[/]"
        table.add_row(escape(result.name), state, f"{result.seconds:.1f}", escape(result.message))
    out = console()
    out.print(table)
    if file is not None:
        out.print(f"Everything is in {file}: attach it to a bug report.", markup=False)
    elif not report.passed:
        out.print("Run it again with --report selftest.txt and attach that file to a bug report.", markup=False)


def _title(report: Report) -> str:
    about = report.environment
    return f"rocmega {about['rocmega']} on {about['device']} ({about['arch']}), driver {about['device_driver']}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rocmega selftest",
        description="Check what the mega-task needs of this device, and the mega-task on it: hand-offs between blocks, "
        "bandwidth and latencies, small models against float32, the same bits every time, and an error where a step "
        "cannot end.",
    )
    add = parser.add_argument
    add("--device", default="auto", help="auto, host, hip or cuda")
    add("--soak", type=int, default=0, metavar="STEPS", help="also a long run of so many steps, such as 10000")
    add("--report", type=Path, metavar="FILE", help="write everything there, for a bug report: .json, else text")
    add("--json", action="store_true", help="print one JSON object")
    return parser
