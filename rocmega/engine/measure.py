"""Times whole answers through the engine, by every path: python -m rocmega.engine.measure --help.

What `rocmega compare` leaves out: the host between two steps. For each number of rows, all ways to decode on the same
loaded model, by turns: milliseconds a token (median and 99th percentile, as the caller sees them), the host's CPU time
a token, launches a token. And two checks: every step of 1 to 16 rows can be the mega-task's, and a request that changes
paths again and again gives the tokens of either path alone, up to a token whose two best logits are as near to each
other as the paths' logits are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.engine.engine import MAX_TOKENS_PER_LAUNCH
from rocmega.errors import RequestError, RocmegaError

if TYPE_CHECKING:
    import torch

    from rocmega.llm import LLM

SETTLE = 3  # tokens of an answer that are not timed: its prompt is cached, kernels are loaded


@dataclass(frozen=True)
class Way:
    """A way to decode: a path, and how many tokens a launch has."""

    name: str
    path: str
    tokens_per_launch: int = 1


WAYS = (
    Way("standard path, eager", "standard"),
    Way("fused kernels, graph", "fused"),
    Way("mega-task, a launch a token", "mega"),
    Way("mega-task, tokens_per_launch auto", "mega", MAX_TOKENS_PER_LAUNCH),
)


@dataclass(frozen=True)
class Timing:
    """One way with some rows.

    Fields: ms, p99: of a token of every row. cpu_ms: the process's CPU time for it. launches: of the mega-task, a
    token; None for other paths.
    """

    way: str
    rows: int
    tokens: int
    ms: float
    p99: float
    cpu_ms: float
    launches: float | None


@dataclass(frozen=True)
class Switching:
    """A request that changes between two paths with every token, beside each path alone, greedily.

    Fields: equal: tokens before the first difference, of `tokens`. margin: by how much the best logit leads there, by
    the standard path. apart: the largest difference between the two paths' logits there. None if all are equal.
    """

    paths: tuple[str, str]
    tokens: int
    equal: int
    margin: float | None = None
    apart: float | None = None

    @property
    def explained(self) -> bool:
        """Whether a difference is one that rounding decides."""
        return self.margin is None or self.apart is None or self.margin <= 2 * self.apart


def time_way(llm: LLM, way: Way, rows: int, tokens: int, prompt: int) -> Timing:
    """Answers of `rows` requests with prompts of `prompt` tokens. Raises RequestError if the path cannot run them."""
    from rocmega.engine import Request
    from rocmega.sampling import SamplingParams

    engine = llm.engine
    sampling = SamplingParams(max_tokens=tokens + SETTLE, ignore_eos=True)
    with _decoding(llm, way):
        launches, steps = engine.counts.launches, engine.counts.steps["mega"]
        requests = [Request(_prompt(llm, row, prompt), sampling) for row in range(rows)]
        for request in requests:
            engine.add(request)
        while min(len(request.token_ids) for request in requests) < SETTLE:
            engine.step()
        cpu, times = time.process_time(), [time.perf_counter()]
        while engine.running:
            engine.step()
            times.append(time.perf_counter())
        cpu = time.process_time() - cpu
        count = len(times) - 1
        launches, steps = engine.counts.launches - launches, engine.counts.steps["mega"] - steps
    each = sorted((after - before) * 1e3 for before, after in itertools.pairwise(times))
    p99 = each[min(count - 1, count * 99 // 100)]
    per_token = (launches or steps) / sampling.max_tokens if way.path == "mega" else None
    return Timing(way.name, rows, count, statistics.median(each), p99, cpu * 1e3 / count, per_token)


def covered(llm: LLM, rows: int, prompt: int) -> float:
    """The mega-task's share of the tokens of some requests on path "auto", nothing measured before."""
    from rocmega.sampling import SamplingParams

    kept, llm.runner.measured = llm.runner.measured, ()
    try:
        with _decoding(llm, Way("", "auto")):
            sampling = SamplingParams(max_tokens=2, ignore_eos=True)
            outputs = llm.generate([_prompt(llm, row, prompt) for row in range(rows)], sampling)
    finally:
        llm.runner.measured = kept
    return sum(output.tokens_by_path.get("mega", 0) for output in outputs) / (2 * rows)


def switching(llm: LLM, other: str, tokens: int, prompt: int) -> Switching:
    """The mega-task and another path, alone and by turns."""
    alone = {path: _answer(llm, [path], tokens, prompt) for path in ("mega", other)}
    mixed, _ = _answer(llm, ["mega", other], tokens, prompt)
    first = next((at for at in range(tokens) if len({mixed[at], *(alone[path][0][at] for path in alone)}) > 1), tokens)
    if first == tokens:
        return Switching(("mega", other), tokens, tokens)
    mine, theirs = (alone[path][1][first] for path in ("mega", other))
    best = theirs.topk(2).values
    return Switching(("mega", other), tokens, first, float(best[0] - best[1]), float((mine - theirs).abs().max()))


def _answer(llm: LLM, paths: list[str], tokens: int, prompt: int) -> tuple[list[int], list[torch.Tensor]]:
    """An answer whose steps take the paths by turns: tokens, and the logits behind each."""
    from rocmega.engine import Request
    from rocmega.sampling import SamplingParams

    logits: list[torch.Tensor] = []
    request = Request(_prompt(llm, 0, prompt), SamplingParams(max_tokens=tokens, ignore_eos=True))
    request.observer = lambda number, row: logits.append(row.detach().float().cpu().clone())
    with _decoding(llm, Way("", paths[0])):
        llm.engine.add(request)
        while not request.finished:
            llm.engine.path = paths[len(request.token_ids) % len(paths)]
            llm.engine.step()
    return request.token_ids, logits


@contextmanager
def _decoding(llm: LLM, way: Way) -> Iterator[None]:
    engine = llm.engine
    kept = engine.path, engine.tokens_per_launch
    engine.path, engine.tokens_per_launch = way.path, way.tokens_per_launch
    try:
        yield
    finally:
        engine.path, engine.tokens_per_launch = kept


def _prompt(llm: LLM, row: int, length: int) -> list[int]:
    return [(11 + 7 * row + at * at) % llm.runner.vocab_size for at in range(length)]


def measure(llm: LLM, rows: list[int], tokens: int, prompt: int) -> tuple[list[Timing], dict[int, float], list[Any]]:
    """All of it: timings, the mega-task's share for 1 ... max_rows rows, and what switching gave."""
    ways = [way for way in WAYS if way.path in llm.runner.paths]
    timings = []
    for count in rows:
        for way in ways:  # once for what is compiled, loaded and captured on the way
            time_way(llm, way, count, 2, prompt)
        timings += [time_way(llm, way, count, tokens, prompt) for way in ways]
    shares = {count: covered(llm, count, prompt) for count in range(1, llm.runner.max_rows + 1)}
    others = [path for path in llm.runner.paths if path != "mega"]
    return timings, shares, [switching(llm, other, min(tokens, 64), prompt) for other in others]


def show(where: str, timings: list[Timing], shares: dict[int, float], switched: list[Switching]) -> None:
    """For people."""
    from rich import box
    from rich.table import Table

    from rocmega.cli.output import console

    out = console()
    table = Table("rows", "way", "ms", "p99", "CPU ms", "launches", title=f"a token, {where}", box=box.SIMPLE_HEAD)
    for each in timings:
        launches = "" if each.launches is None else f"{each.launches:.3g}"
        table.add_row(str(each.rows), each.way, f"{each.ms:.3f}", f"{each.p99:.3f}", f"{each.cpu_ms:.3f}", launches)
    out.print(table)
    least = min(shares.values())
    out.print(f"The mega-task's share of the tokens, 1 to {max(shares)} rows: {least:.0%} or more.")
    for found in switched:
        text = f"{found.paths[0]} and {found.paths[1]} by turns: {found.equal} of {found.tokens} tokens as either alone"
        if found.margin is not None:
            text += f"; then the best logit leads by {found.margin:.2g}, and the paths are {found.apart:.2g} apart"
        out.print(f"{text}.")


def main() -> None:
    """Prints a table, or one JSON object. Exit code 1 if a check failed, 2 if nothing could be measured."""
    options = _options()
    from rocmega.llm import LLM

    try:
        with tempfile.TemporaryDirectory(prefix="rocmega-measure-") as folder:
            model = Path(options.model)
            if not model.is_dir():
                from rocmega.registry import presets_of

                model = presets_of(options.model).write_checkpoint(options.model, Path(folder), options.format)
            longest = options.prompt + options.tokens + SETTLE + 1
            settings = {"device": options.device, "blocks": options.blocks, "max_rows": options.max_rows}
            with LLM(model, **settings, max_model_len=max(longest, 128)) as llm:
                if "mega" not in llm.runner.paths:
                    llm.runner.decide([llm.runner.sequence()], "mega")  # raises with all reasons
                found = measure(llm, [int(rows) for rows in options.rows.split(",")], options.tokens, options.prompt)
                where = llm.runner.where
    except RocmegaError as error:
        print(f"rocmega: {error}", file=sys.stderr)
        sys.exit(2)
    timings, shares, switched = found
    if options.json:
        listed = {"timings": [asdict(each) for each in timings], "switching": [asdict(each) for each in switched]}
        print(json.dumps({"where": where, "model": options.model, "coverage": shares, **listed}))
    else:
        show(where, timings, shares, switched)
    sys.exit(0 if min(shares.values()) == 1 and all(each.explained for each in switched) else 1)


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="python -m rocmega.engine.measure")
    parser.add_argument("model", help="a checkpoint, or a small model by name, which is written with random weights")
    parser.add_argument("--format", default="fp8", help="of a model by name")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--max-rows", type=int, default=16, help="coverage is checked for 1 to so many")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--blocks", type=int, help="of the mega-task")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.tokens < 2:
        raise RequestError("--tokens: at least 2 are needed.")
    return options


if __name__ == "__main__":
    main()
