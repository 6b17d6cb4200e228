"""`rocmega demo`: a tiny model, three ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rocmega.demo import Comparison

TITLES = {
    "mega": "mega-task",
    "standard": "standard path",
    "transformers": "transformers",
    "reference": "reference",
}


def demo(
    model: str = typer.Option("glm-5.2-tiny", help="A model with random weights, such as deepseek-v4-tiny."),
    tokens: int = typer.Option(32, min=1, max=1024, help="How many tokens each path decodes."),
    blocks: int | None = typer.Option(None, min=1, help="Blocks of the mega-task. Any number gives the same bits."),
    device: str = typer.Option("auto", help="auto, host, hip or cuda."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Decode a tiny model by the mega-task, the standard path and transformers, and compare."""
    import torch

    from rocmega.cli.output import print_json, progress
    from rocmega.demo import run

    torch.set_num_threads(1)  # for matrices as small as these, threads only wait for each other
    with progress(quiet=json) as show:
        result = run(model, tokens=tokens, blocks=blocks, device=device, progress=show)
    if json:
        print_json(result.report())
    else:
        _print(result)
    if not result.agree:
        raise typer.Exit(1)


def _print(result: Comparison) -> None:
    from rich.table import Table

    from rocmega.cli.output import console

    out = console()
    out.print(f"{result.model}, random weights, a prompt of {len(result.prompt)} tokens, greedy\n")
    for path, run in result.runs.items():
        out.print(f"[bold]{TITLES[path]}[/bold]: {' '.join(map(str, run.tokens))}")
    for path, reason in result.skipped.items():
        out.print(f"{TITLES[path]} did not run: {reason}", markup=False)
    table = Table("path", "launches per token", "seconds", "ran on")
    for path, run in result.runs.items():
        table.add_row(TITLES[path], f"{run.launches:g}", f"{run.seconds:.1f}", run.where)
    out.print()
    out.print(table)
    for counted in dict.fromkeys(run.counted for run in result.runs.values()):
        of = ", ".join(TITLES[path] for path, run in result.runs.items() if run.counted == counted)
        out.print(f"Launches of the {of}: {counted}.")
    ran = ", ".join(TITLES[path] for path in result.runs)
    if result.agree:
        out.print(f"[green]All agree[/green]: {ran} chose the same {len(result.runs['standard'].tokens)} tokens.")
    else:
        out.print(f"[red]They differ[/red]: {ran} did not choose the same tokens.")
    out.print(f"Largest difference of a logit between any two: {result.max_logit_diff:.2e}")
    if result.device == "host":
        out.print("The CPU target runs the GPU kernel's source, each thread a fiber: its seconds say nothing of a GPU.")
