"""`rocmega check`: the protocol of a mega-task, or of a stage of your own, under hostile caches and orders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rocmega.errors import RequestError

if TYPE_CHECKING:
    from rocmega.check import Case, Failure, Subject, Summary
    from rocmega.progress import Progress

FOUND = 1  # exit code


def check(
    stage: Path | None = typer.Argument(
        None, metavar="[STAGE.py]", help="A Python file that describes a stage of your own (docs/protocol.md)."
    ),
    model: str | None = typer.Option(None, help="Check a model's mega-task, such as glm-5.2."),
    preset: str = typer.Option("tiny", help="Dimensions of the model, with random weights."),
    dtype: str = typer.Option("f32", help="Format of the weights: f32, bf16, fp8 or mxfp4."),
    ranks: int = typer.Option(1, min=1, help="Ranks that share the model, all in one launch."),
    seeds: int = typer.Option(200, min=1, help="How many cases to run."),
    first: int = typer.Option(0, min=0, help="The first seed: go on where another run ended."),
    minutes: float | None = typer.Option(
        None, min=0.0, help="Stop after so many minutes; each of the two parts with --preemptions."
    ),
    jobs: int | None = typer.Option(None, min=1, help="Processes; one a core unless given."),
    replay: str | None = typer.Option(None, metavar="CASE", help="Run one case again: seed,blocks,rows,xcds."),
    preemptions: int = typer.Option(
        0, min=0, help="For small kernels: also run all orders with up to so many preemptions of two blocks."
    ),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Run a kernel under caches that are not coherent, stores that take their time, and hostile orders of its threads.

    Exits with 1 if anything was found, and tells who wrote what, who read it, and what was missing.
    """
    from rocmega.check import Case
    from rocmega.check import check as search
    from rocmega.cli.output import progress

    make = _subject(stage, model, preset, dtype, ranks)
    with progress(quiet=json) as show:
        if replay is not None:
            summary = _replay(make, Case.parse(replay))
        else:
            summary = search(make, seeds=seeds, first=first, minutes=minutes, jobs=jobs, progress=show)
        seconds = 60 * (minutes or 1)
        explored = _explore(make, summary, preemptions, seconds, show) if preemptions and summary.clean else None
        shortest = _shortest(make, summary, show) if summary.failure else None
    if json:
        _print_json(summary, shortest, explored)
    else:
        _print(summary, shortest, explored)
    if not summary.clean:
        raise typer.Exit(FOUND)


def _subject(stage: Path | None, model: str | None, preset: str, dtype: str, ranks: int) -> Callable[[], Subject]:
    from rocmega import registry
    from rocmega.check import load

    if (stage is None) == (model is None):
        raise RequestError("Give either the Python file of a stage or --model.")
    if stage is not None:
        return functools.partial(load, stage)
    name = f"{model}-{preset}"
    model_type = registry.presets_of(name).preset(name)["model_type"]
    return functools.partial(registry.family_module(model_type, "check").MegaSubject, name, dtype, ranks)


def _replay(make: Callable[[], Subject], case: Case) -> Summary:
    from rocmega.check import Failure, Summary, run
    from rocmega.check.subject import reference

    subject = make()
    got = run(subject, case, reference(subject, case.rows))
    summary = Summary(subject.name, seeds=(case.seed, case.seed + 1))
    summary.runs[case.blocks, case.rows] += 1
    summary.failure = got if isinstance(got, Failure) else None
    return summary


def _shortest(make: Callable[[], Subject], summary: Summary, show: Progress) -> Failure:
    from rocmega.check import shorten

    assert summary.failure is not None
    return shorten(make(), summary.failure, progress=show)


def _explore(
    make: Callable[[], Subject], summary: Summary, preemptions: int, seconds: float, show: Progress
) -> dict[str, Any]:
    from rocmega.check import Case, explore

    subject = make()
    rows = min(subject.rows)
    case = Case(0, 2, rows, 8)
    orders, all_of_them, failure = explore(subject, case, preemptions=preemptions, seconds=seconds, progress=show)
    summary.failure = failure
    return {"orders": orders, "all": all_of_them, "preemptions": preemptions}


def _print_json(summary: Summary, shortest: Failure | None, explored: dict[str, Any] | None) -> None:
    from rocmega.cli.output import print_json

    failure = None
    if summary.failure and shortest:
        failure = {
            "case": str(summary.failure.case),
            "stage": shortest.stage,
            "report": shortest.text,
            "shortest_case": str(shortest.case),
            "switches": len(shortest.choices),
            "story": shortest.story.splitlines(),
        }
    runs = [{"blocks": b, "rows": r, "runs": n} for (b, r), n in sorted(summary.runs.items())]
    print_json(
        {
            "subject": summary.name,
            "clean": summary.clean,
            "seeds": list(summary.seeds),
            "runs": runs,
            "turns": summary.turns,
            "seconds": round(summary.seconds, 1),
            "explored": explored,
            "failure": failure,
        }
    )


def _print(summary: Summary, shortest: Failure | None, explored: dict[str, Any] | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from rocmega.cli.output import console

    out = console()
    blocks, rows = (sorted({size[i] for size in summary.runs}) for i in (0, 1))
    table = Table("blocks", *(f"rows: {n}" for n in rows), title=f"{summary.name}: runs", title_justify="left")
    for b in blocks:
        table.add_row(str(b), *(str(summary.runs[b, r]) for r in rows))
    out.print(table)
    if explored:
        which = "all" if explored["all"] else "the first"
        out.print(f"{which} {explored['orders']} orders with up to {explored['preemptions']} preemptions of two blocks")
    took = f"{summary.total} runs, {summary.turns} turns of waves, {summary.seconds:.0f} s"
    if summary.failure is None or shortest is None:
        out.print(f"[green]clean[/green]: {took}")
        return
    out.print(f"[red]found[/red] in case {summary.failure.case} after {took}\n")
    out.print(Text(shortest.text))
    if shortest.story:
        out.print(Text(f"\n{shortest.story}"), end="")
    out.print(Text(_how_short(summary.failure, shortest)))


def _how_short(failure: Failure, shortest: Failure) -> str:
    size = f"\nshortest: {shortest.case.blocks} blocks, {shortest.case.rows} rows"
    if shortest.order is None:
        return f"{size}, in the order of seed {shortest.case.seed} (--replay {shortest.case})"
    memory = "and caches and stores need do nothing unusual" if shortest.order.kind_memory else "with the seed's caches"
    if not shortest.choices:
        return f"{size}; no particular order is needed, {memory} (--replay {shortest.case})"
    turns = ", ".join(f"turn {turn}: wave {wave}" for turn, wave in shortest.choices[:8])
    more = f" and {len(shortest.choices) - 8} more" if len(shortest.choices) > 8 else ""
    return f"{size}; {len(shortest.choices)} switches between waves, {memory}: {turns}{more} (--replay {shortest.case})"
