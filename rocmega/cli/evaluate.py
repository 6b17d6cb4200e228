"""`rocmega eval`: accuracy of the two paths, and of formats, on the same questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rocmega.eval.run import Report
    from rocmega.eval.statistics import Pairing


def evaluate(
    model: Path | None = typer.Argument(
        None, help="A checkpoint's or a pack's folder; else the small trained model that comes with rocmega."
    ),
    puzzles: int = typer.Option(50, min=1, max=1000, help="How many of each task."),
    tasks: str = typer.Option("", help="Some tasks only, such as add,recall."),
    seed: int = typer.Option(0, help="Other puzzles for another seed."),
    formats: str = typer.Option("", help="The same weights in f32, bf16, fp8 or mxfp4, such as bf16,fp8,mxfp4."),
    paths: str = typer.Option(
        "standard,mega", help="Of standard, mega, fused; the others are compared with the first."
    ),
    device: str = typer.Option("auto", help="auto, host, hip or cuda."),
    activations: str = typer.Option("auto", help="auto, f32, bf16 or fp8."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Let the standard path and the mega-task answer the same puzzles, and compare: accuracy, answers, logits.

    The puzzles have one right answer each; rocmega.models.glm.training made the model that knows them. With --formats,
    the weights are converted and the formats compared as the paths are.
    """
    from rocmega.cli.output import print_json, progress
    from rocmega.eval.puzzles import TASKS
    from rocmega.eval.run import PATHS, STORED, TITLES, evaluate
    from rocmega.models.glm.training import SHIPPED

    with progress(quiet=json) as show:
        report = evaluate(
            SHIPPED if model is None else model,
            each=puzzles,
            seed=seed,
            tasks=_listed("--tasks", tasks, tuple(TASKS)) or tuple(TASKS),
            formats=_listed("--formats", formats, None) or (STORED,),
            paths=_listed("--paths", paths, tuple(TITLES)) or PATHS,
            device=device,
            activations=activations,
            progress=show,
        )
    if json:
        print_json(report.to_json())
    else:
        _print(report)


def _listed(option: str, given: str, known: tuple[str, ...] | None) -> tuple[str, ...]:
    """A comma-separated option's parts. Raises RequestError for one that is not known, or comes twice."""
    from rocmega.errors import RequestError

    parts = tuple(part.strip() for part in given.split(",") if part.strip())
    unknown = [part for part in parts if known is not None and part not in known]
    if unknown and known is not None:
        raise RequestError(f"{option} {given!r}: {', '.join(unknown)} is none of {', '.join(known)}.")
    if len(set(parts)) < len(parts):
        raise RequestError(f"{option} {given!r}: the same thing twice.")
    return parts


def _print(report: Report) -> None:
    from rich.table import Table

    from rocmega.cli.output import console
    from rocmega.eval.statistics import wilson

    out = console()
    asked = len(report.puzzles)
    rights = [report.right_by_task(arm) for arm in report.arms]
    table = Table("right answers", *(arm.name for arm in report.arms), title=f"{report.model}, {asked} puzzles")
    for task, count in report.to_json()["asked_by_task"].items():
        table.add_row(task, *(f"{right[task] / count:.1%}" for right in rights))
    table.add_section()
    table.add_row("all", *(f"[bold]{arm.right / asked:.1%}[/bold]" for arm in report.arms))
    table.add_row("95 % interval", *("{:.1%} to {:.1%}".format(*wilson(arm.right, asked)) for arm in report.arms))
    out.print(table)
    for where in dict.fromkeys((arm.where, arm.activations) for arm in report.arms):
        out.print("Ran on {}, {} activations.".format(*where))
    if report.pairs:
        out.print(_pairs(report.pairs))
        out.print(
            "lost, won: answered right by the first only, by the second only. p: McNemar's exact test. same answers: "
            "token for token. |logit difference|: over tokens with the same ones before them."
        )
    for pairing in report.pairs:
        out.print(_in_words(pairing))


def _pairs(pairs: list[Pairing]) -> object:
    from rich.table import Table

    table = Table("pair", "lost", "won", "p", "same answers", "mean |logit difference|", "max")
    for found in pairs:
        table.add_row(
            f"{found.base} / {found.other}",
            str(found.lost),
            str(found.won),
            f"{found.p_value:.3g}",
            f"{found.same} of {found.asked}",
            f"{found.mean_difference:.2e}",
            f"{found.max_difference:.2e}",
        )
    return table


def _in_words(found: Pairing) -> str:
    kind = "[red]beyond chance[/red]" if found.distinguishable else "[green]within chance[/green]"
    share = (found.other_right - found.base_right) / found.asked
    first = "" if found.gap is None else f"; where tokens first differ, the first's led by {found.gap:.2g} at most"
    return f"{found.base} / {found.other}: accuracy {share:+.1%}, {kind}{first}."
