"""ms per token against context, one line for each arm and one panel for each number of rows."""

from __future__ import annotations

from pathlib import Path

from rocmega.compare.arms import ARMS
from rocmega.compare.report import Report
from rocmega.errors import RequestError

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


def plot(report: Report, file: Path) -> None:
    """Draws the report; the labels are part of the picture."""
    from matplotlib.figure import Figure

    counts = sorted({row.rows for row in report.rows})
    figure = Figure(figsize=(4.2 * len(counts), 4.4), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, count in zip(panels, counts, strict=True):
        for number, (arm, about) in enumerate(ARMS.items()):
            points = [(row.context, row.ms) for row in report.rows if (row.arm, row.rows) == (arm, count) and row.ms]
            if points:
                panel.plot(*zip(*sorted(points), strict=True), marker="o", label=about.title, color=f"C{number}")
        limit = _limit(report, count)
        if limit:
            panel.plot(*zip(*limit, strict=True), linestyle=":", color="gray", label="bytes / measured bandwidth")
        panel.set(title=f"{count} row{'s' * (count > 1)}", xlabel="context, tokens", xscale="log", ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("ms per token of each row, median")
    panels[0].legend(fontsize="small")
    figure.suptitle("\n".join([report.environment["device"], *report.labels()]), fontsize="small", wrap=True)
    figure.savefig(file)


def _limit(report: Report, count: int) -> list[tuple[int, float]]:
    if report.bandwidth is None:
        return []
    reads = {row.context: row.bytes for row in report.rows if row.rows == count and row.bytes}
    return sorted((context, size / report.bandwidth.bytes_per_second * 1e3) for context, size in reads.items())
