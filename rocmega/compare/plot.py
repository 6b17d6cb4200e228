"""ms per token against context, one line for each arm and one panel for each number of rows.

`python -m rocmega.compare.plot figures.json figures.svg` draws what `rocmega compare --json` wrote, wherever that was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rocmega.errors import RequestError, RocmegaError

SUFFIXES = (".png", ".svg")


def check(file: Path) -> None:
    """Raises RequestError now if `plot` could not draw there later."""
    if file.suffix not in SUFFIXES:
        raise RequestError(f"--plot {file}: the name has to end in {' or '.join(SUFFIXES)}.")
    if not file.absolute().parent.is_dir():
        raise RequestError(f"--plot {file}: its folder does not exist.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError("--plot needs matplotlib: pip install 'rocmega[plot]', or leave it out.") from None


def plot(report: dict[str, Any], file: Path) -> None:
    """Draws a report, as Report.to_json gives it; its labels are part of the picture."""
    from matplotlib.figure import Figure

    counts = sorted({row["rows"] for row in report["rows"]})
    arms = list(dict.fromkeys(row["arm"] for row in report["rows"]))
    figure = Figure(figsize=(4.2 * len(counts), 4.4), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, count in zip(panels, counts, strict=True):
        rows = [row for row in report["rows"] if row["rows"] == count]
        for number, arm in enumerate(arms):
            points = [row for row in rows if row["arm"] == arm and row["ms_per_token"] is not None]
            if points:
                x, y = ([point[key] for point in points] for key in ("context", "ms_per_token"))
                panel.plot(x, y, marker="o", label=points[0]["title"], color=f"C{number}")
        _limit(panel, report, rows)
        contexts = sorted({row["context"] for row in rows})
        panel.set(title=f"{count} row{'s' * (count > 1)}", xlabel="context, tokens", xscale="log", ylim=(0, None))
        panel.set_xticks(contexts, labels=[f"{context:,}" for context in contexts])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("ms per token of each row, median")
    panels[0].legend(fontsize="small")
    figure.suptitle("\n".join([report["environment"]["device"], *report["labels"]]), fontsize="small", wrap=True)
    figure.savefig(file)


def _limit(panel: Any, report: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """What reading the bytes alone would take."""
    if report["bandwidth"] is None:
        return
    reads = {row["context"]: row["bytes_per_step"] for row in rows if row["bytes_per_step"]}
    times = [reads[context] / report["bandwidth"]["bytes_per_second"] * 1e3 for context in sorted(reads)]
    panel.plot(sorted(reads), times, linestyle=":", color="gray", label="bytes at the measured bandwidth")


def main(arguments: list[str]) -> None:
    """The command in this file's description."""
    try:
        if len(arguments) != 2:
            raise RequestError("Give the file that `rocmega compare --json` wrote, and the picture's.")
        source, file = map(Path, arguments)
        check(file)
        try:
            report = json.loads(source.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RequestError(f"{source} cannot be read: {error}.") from None
        plot(report, file)
    except RocmegaError as error:
        print(f"rocmega: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
