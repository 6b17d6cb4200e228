"""The command: what `rocmega compare` and `python -m rocmega.compare` both do."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rocmega.compare import measure
from rocmega.compare.options import parse
from rocmega.errors import RequestError

if TYPE_CHECKING:
    from rocmega.compare.report import Report


def command(arguments: Sequence[str]) -> None:
    """Compares and prints. Raises RocmegaError if there is nothing to compare."""
    request = parse(arguments)
    from rocmega.cli.output import progress
    from rocmega.compare.plot import check, plot
    from rocmega.compare.show import show

    if request.plot is not None:
        check(request.plot)
    on_stdout = request.json == Path("-")
    for name, file in (("json", request.json), ("timeline", request.timeline)):
        if file is not None and not file.absolute().parent.is_dir():
            raise RequestError(f"--{name} {file}: its folder does not exist.")
    with progress(quiet=on_stdout) as tell:
        report = measure(request.options, tell)
    if request.json is not None:
        _write(report, None if on_stdout else request.json)
    if request.plot is not None:
        plot(report.to_json(), request.plot)
    if request.timeline is not None and report.timeline is not None:
        report.timeline.timeline.write(request.timeline, " ".join(report.labels()))
    if not on_stdout:
        show(report)
    if all(row.ms is None for row in report.rows):
        sys.exit(1)  # nothing was measured: every row says why


def _write(report: Report, file: Path | None) -> None:
    text = json.dumps(report.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
    if file is None:
        print(text)
        return
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--json {file} could not be written: {error}.") from None


def main() -> None:
    """`python -m rocmega.compare`: the command where typer is not installed."""
    from rocmega.errors import RocmegaError

    try:
        command(sys.argv[1:])
    except RocmegaError as error:
        print(f"rocmega: {error}", file=sys.stderr)
        sys.exit(2)
