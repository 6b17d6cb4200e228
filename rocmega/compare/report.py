"""The result of a comparison: rows, what they are worth, and how they look."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rocmega.compare.arms import ARMS
from rocmega.compare.published import FIGURES, Published
from rocmega.compare.timing import Times

if TYPE_CHECKING:
    from rocmega.compare.accuracy import Verdict
    from rocmega.compare.bandwidth import Bandwidth
    from rocmega.compare.options import Options
    from rocmega.timeline import StageRow, Timeline

HEADER = ("arm", "ms", "p5 to p95", "us/layer", "launches", "bandwidth", "vs best", "error")
CPU_NOTE = "Times of the CPU target say nothing about a GPU: it runs each GPU thread as a fiber."


@dataclass
class Row:
    """One arm at one number of rows and one context.

    Fields:
        bytes: that its step reads.
        reason: why it has no latency, None if it has; details: the traceback of what its arm raised.
        launches: of a step, and how they were counted. rounds: what was timed.
    """

    arm: str
    rows: int
    context: int
    bytes: float = 0.0
    reason: str | None = None
    details: str | None = None
    verdict: Verdict | None = None
    launches: tuple[int, str] | None = None
    rounds: list[Times] = field(default_factory=list)

    @property
    def best(self) -> Times | None:
        """The round with the lowest median; None without a verdict that it is worth anything."""
        return min(self.rounds, key=lambda times: times.median) if self.rounds and self.reason is None else None

    @property
    def ms(self) -> float | None:
        """Per token of each row."""
        return None if self.best is None else self.best.median / ARMS[self.arm].tokens


@dataclass(frozen=True)
class Apart:
    """A step of the mega-task taken apart.

    mixtures: microseconds of a mixture layer without and with an indexer, stamps included; None if it cannot be told.
    """

    rows: int
    context: int
    timeline: Timeline
    stages: list[StageRow]
    diagnosis: str
    mixtures: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        line = self.timeline
        about = {"rows": self.rows, "context": self.context, "unit": line.unit, "length": line.length}
        about |= {"blocks": line.blocks, "blocks_out_of_room": line.truncated, "diagnosis": self.diagnosis}
        about |= {"us_of_mixture_layers": self.mixtures}
        return {**about, "stages": [vars(stage) for stage in self.stages]}

    def title(self) -> str:
        """What was taken apart."""
        line = self.timeline
        lost = f"; {line.truncated} blocks ran out of room for stamps" if line.truncated else ""
        return (
            f"Where the mega-task's time goes, {_rows(self.rows)}, context {self.context:,}: {line.length:.0f} "
            f"{line.unit} with stamps, which cost something, on {line.blocks} blocks{lost}"
        )


@dataclass
class Report:
    """Everything that was measured. about: what was compared; layers: of it; timeline: if it was asked for."""

    options: Options
    environment: dict[str, Any]
    about: dict[str, Any]
    layers: int
    bandwidth: Bandwidth | None
    rows: list[Row]
    timeline: Apart | None = None

    @property
    def on_cpu(self) -> bool:
        return bool(self.environment["arch"] == "host")

    def share(self, row: Row) -> float | None:
        """How much of the measured read bandwidth the row's step makes use of, 0 to 1."""
        if row.ms is None or self.bandwidth is None:
            return None
        return row.bytes / (row.ms * 1e-3) / self.bandwidth.bytes_per_second

    def speedup(self, row: Row) -> float | None:
        """How many times faster than the best standard arm at the same rows and context."""
        others = [
            other.ms
            for other in self.rows
            if (other.rows, other.context) == (row.rows, row.context)
            and ARMS[other.arm].standard
            and other.ms is not None
        ]
        return min(others) / row.ms if others and row.ms is not None else None

    def labels(self) -> list[str]:
        """What nobody may quote a figure without."""
        about = self.about
        out = [
            f"{about['model']}, {self.layers} layers in {about['label']}, activations {about['activations']}; "
            f"{about['weights']}; the cache holds {about['cache']}."
        ]
        if about["tp"] > 1:
            out.append(
                f"Rank {about['rank']} of {about['tp']} alone on one device (loopback): its part of heads, experts and "
                "vocabulary. The mega arm sums up shares by its hand-offs between ranks, its own in everybody's place, "
                "without links; the other arms have no reduction at all."
            )
        if self.on_cpu:
            out.append(CPU_NOTE)
        return out

    def notes(self) -> list[str]:
        """Below the table: how to read it."""
        out = []
        if self.bandwidth is not None:
            speed = self.bandwidth.bytes_per_second / 1e12
            out.append(f"Bandwidth: {speed:.2f} TB/s, measured here first ({self.bandwidth.how}).")
        out += [f"{arm}: {ARMS[arm].title}." for arm in dict.fromkeys(row.arm for row in self.rows)]
        out.append(
            "ms: median of the best round, one token of each row. us/layer: ms over all layers, embedding, head and "
            "choice of the token included. bandwidth: how much of the measured one the step's bytes make use of. vs "
            "best: how many times faster than the best standard arm. error: relative distance of a typical row's "
            "logits from float32."
        )
        if self.timeline is not None:
            out.append(
                f"Stages: waiting and working of a task in {self.timeline.timeline.unit}, then of all blocks' time. "
                "bandwidth: what the stage's bytes would use of it if all blocks did nothing else."
            )
            out.append(self.timeline.diagnosis)
            if self.timeline.mixtures and self.published:
                out.append(
                    "mega, here: median mixture layer without / with an indexer, from the end of the layer before to "
                    "its own, by the stamps of one step, scaled to the step without stamps. Embedding, head and choice "
                    "of the token are not in it."
                )
        for reason in dict.fromkeys(row.reason for row in self.rows if row.reason):
            of = [f"{row.arm} ({_rows(row.rows)}, {row.context:,})" for row in self.rows if row.reason == reason]
            out.append(f"No latency of {', '.join(of)}: {reason}")
        out += [f"[{number}] {figure.footnote}" for number, figure in enumerate(self.published, 1)]
        return out

    @property
    def published(self) -> list[Published]:
        """Figures of others for this model."""
        return [figure for figure in FIGURES if figure.model == self.about["model"]]

    def tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """A title and lines below HEADER for each number of rows and each context; published figures come last."""
        made = []
        for count, context in dict.fromkeys((row.rows, row.context) for row in self.rows):
            rows = [row for row in self.rows if (row.rows, row.context) == (count, context)]
            made.append((self._title(rows[0]), [self._cells(row) for row in rows]))
        made += [self._beside(number, figure) for number, figure in enumerate(self.published, 1)]
        return made

    def _beside(self, number: int, figure: Published) -> tuple[str, list[tuple[str, ...]]]:
        """What others published, and below it ours of the same rows and context where they were measured."""
        title = f"Published: {_rows(figure.rows)}, context {figure.context:,}, rank of {figure.tp}"
        if self.bandwidth is not None:
            times = figure.bandwidth / self.bandwidth.bytes_per_second
            title += f"; its memory is {times:.2f} times as fast as what was measured here"
        lines = [_cells_of(f"{figure.what} [{number}]", " / ".join(map(str, figure.us_per_layer)))]
        apart = self.timeline
        if apart is not None and apart.mixtures and (apart.rows, apart.context) == (figure.rows, figure.context):
            scale = self._without_stamps(apart)
            lines.append(_cells_of("mega, here", " / ".join(f"{us * scale:.1f}" for us in apart.mixtures)))
        return title, lines

    def _without_stamps(self, apart: Apart) -> float:
        """The step's time without stamps over that with them; 1 if it was not timed."""
        timed = [row.ms for row in self.rows if (row.arm, row.rows, row.context) == ("mega", apart.rows, apart.context)]
        return timed[0] * 1e3 / apart.timeline.length if timed and timed[0] else 1.0

    def _title(self, row: Row) -> str:
        title = f"{_rows(row.rows)}, context {row.context:,}"
        if not row.bytes:
            return title
        size = f"{row.bytes / 1e9:.2f} GB" if row.bytes >= 1e9 else f"{row.bytes / 1e6:.0f} MB"
        if self.bandwidth is None:
            return f"{title}: {size} a step"
        return f"{title}: {size} a step, {row.bytes / self.bandwidth.bytes_per_second * 1e3:.3f} ms at full bandwidth"

    def _cells(self, row: Row) -> tuple[str, ...]:
        share, speedup, verdict = self.share(row), self.speedup(row), row.verdict
        error = "-" if verdict is None or verdict.error is None else f"{verdict.error:.1e}"
        if row.best is None or row.ms is None:
            return (row.arm, "none", "see below", "", "", "", "", error)
        tokens, times = ARMS[row.arm].tokens, row.best.to_json()["device_ms"]
        return (
            row.arm,
            f"{row.ms:.3f}",
            f"{times['p5'] / tokens:.3f} to {times['p95'] / tokens:.3f}",
            f"{row.ms * 1e3 / self.layers:.1f}",
            "-" if row.launches is None else f"{row.launches[0] / tokens:g}",
            "-" if share is None else f"{share:.1%}",
            "-" if speedup is None else f"{speedup:.2f}x",
            error,
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        return {
            "labels": self.labels(),
            "about": self.about,
            "environment": self.environment,
            "bandwidth": None if self.bandwidth is None else self.bandwidth.to_json(),
            "rows": [self._row_json(row) for row in self.rows],
            "timeline": None if self.timeline is None else self.timeline.to_json(),
            "published": [vars(figure) for figure in self.published],
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        count, counted = row.launches or (None, None)
        return {
            "arm": row.arm,
            "title": ARMS[row.arm].title,
            "rows": row.rows,
            "context": row.context,
            "reason": row.reason,
            "details": row.details,
            "ms_per_token": row.ms,
            "us_per_layer": None if row.ms is None else row.ms * 1e3 / self.layers,
            "tokens_per_launch": ARMS[row.arm].tokens,
            "launches_per_step": count,
            "launches_counted": counted,
            "bytes_per_step": round(row.bytes),
            "share_of_bandwidth": self.share(row),
            "speedup_over_best_standard": self.speedup(row),
            "verdict": None if row.verdict is None else row.verdict.to_json(),
            "rounds": [] if row.reason else [times.to_json() for times in row.rounds],
        }


def _cells_of(name: str, us_per_layer: str) -> tuple[str, ...]:
    """A line that has nothing else."""
    return (name, "", "", us_per_layer, *[""] * (len(HEADER) - 4))


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count > 1)}"
