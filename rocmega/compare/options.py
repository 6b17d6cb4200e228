"""What is to be compared: the arguments of `rocmega compare`, defined once for both ways to call it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rocmega.errors import RequestError

MOST_ROWS = 16
FORMATS = ("f32", "bf16", "fp8", "mxfp4")


@dataclass(frozen=True)
class Options:
    """A comparison.

    Fields:
        model: a preset (random weights), a checkpoint's folder or a pack.
        tp, rank, loopback: measure one of `tp` ranks alone; `loopback` says that one knows that it is alone.
        layers: the first layers only; all by default.
        format: of a preset's big matrices; of the published checkpoint, and f32 for the tiny ones, by default.
        activations: what big matrices meet, as for `rocmega.LLM`.
        rows, contexts: every pair is measured. contexts: tokens in the cache, the step's own included; by default
            what suits the device.
        arms: names of `arms.ARMS`, all by default.
        steps: timed steps of an arm in a round; rounds: turns that each arm has. None: what suits the device.
        timeline: also take one step of the mega-task apart, of the first rows and context.
        device: auto, host, hip or cuda. blocks: of the mega-task. seed: of weights, cache and tokens.
    """

    model: str = "glm-5.2-tiny"
    tp: int = 1
    rank: int = 0
    loopback: bool = False
    layers: int | None = None
    format: str | None = None
    activations: str = "auto"
    rows: tuple[int, ...] = (1, 4, 8)
    contexts: tuple[int, ...] | None = None
    arms: tuple[str, ...] | None = None
    steps: int | None = None
    rounds: int = 3
    timeline: bool = False
    device: str = "auto"
    blocks: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        from rocmega.compare.arms import ARMS

        if self.tp < 1 or not 0 <= self.rank < self.tp:
            raise RequestError(f"rank {self.rank} of {self.tp}: ranks go from 0 to one less than their number.")
        if self.tp > 1 and not self.loopback:
            raise RequestError(
                f"--tp {self.tp} runs on {self.tp} GPUs. To measure one of the ranks alone, without its peers, add "
                "--loopback."
            )
        if not self.rows or not all(1 <= rows <= MOST_ROWS for rows in self.rows):
            raise RequestError(f"--rows: one or more numbers from 1 to {MOST_ROWS}, such as 1,4,8.")
        if self.contexts is not None and (not self.contexts or min(self.contexts) < 1):
            raise RequestError("--contexts: one or more numbers of tokens, such as 1024,8192.")
        if (self.steps is not None and self.steps < 1) or self.rounds < 1:
            raise RequestError("--steps and --rounds count from 1.")
        if self.format is not None and self.format not in FORMATS:
            raise RequestError(f"--format {self.format!r}: choose one of {', '.join(FORMATS)}.")
        unknown = [arm for arm in self.arms or () if arm not in ARMS]
        if unknown or (self.arms is not None and not self.arms):
            raise RequestError(f"--arms {','.join(unknown)!r}: choose from {', '.join(ARMS)}.")


@dataclass(frozen=True)
class Request:
    """A command line: what to compare, and where the result goes."""

    options: Options
    json: Path | None
    plot: Path | None
    timeline: Path | None


def parse(arguments: Sequence[str]) -> Request:
    """The command line without the program's name. Exits as argparse does for --help and bad usage."""
    values = vars(_parser().parse_args(list(arguments)))
    files = {name: values.pop(name) for name in ("json", "plot", "timeline")}
    return Request(Options(**values, timeline=files["timeline"] is not None), **files)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rocmega compare",
        description="Time decode steps of the mega-task and of the standard path, judged against float32 first.",
    )
    add = parser.add_argument
    add("--model", default=Options.model, help="preset such as glm-5.2 (random weights), checkpoint folder, or pack")
    add("--tp", type=int, default=1, metavar="N", help="measure one rank of N")
    add("--rank", type=int, default=0, metavar="R", help="which; 0 by default")
    add("--loopback", action="store_true", help="the rank is alone: what its peers would send is left out")
    add("--layers", type=int, metavar="N", help="the model's first N layers only")
    add("--format", metavar="F", help=f"of a preset's big matrices: {', '.join(FORMATS)}")
    add("--activations", default="auto", help="what big matrices meet: auto, bf16, fp8 or f32")
    add("--rows", type=_numbers, default=Options.rows, metavar="M,...", help="requests in a step; 1,4,8 by default")
    add("--contexts", type=_numbers, metavar="T,...", help="tokens in each request's cache")
    add("--arms", type=_names, metavar="A,...", help="some of those in docs/performance.md; all by default")
    add("--steps", type=int, metavar="N", help="timed steps of an arm in a round")
    add("--rounds", type=int, default=Options.rounds, metavar="N", help="rounds, in alternating order; 3 by default")
    add("--device", default="auto", help="auto, host, hip or cuda")
    add("--blocks", type=int, metavar="N", help="blocks of the mega-task")
    add("--seed", type=int, default=0, help="of weights, cache and tokens")
    add("--json", type=Path, metavar="FILE", help="write everything there; - for stdout, and no table")
    add("--plot", type=Path, metavar="FILE", help="draw ms per token against context: .png or .svg (needs matplotlib)")
    add("--timeline", type=Path, metavar="FILE", help="write what each block of the mega-task did, for Perfetto")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
