"""`rocmega demo`: a tiny model, three ways."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rocmega.demo import Comparison
    from rocmega.demo_ranks import RanksComparison

MODEL = "glm-5.2-tiny"
TITLES = {
    "mega": "mega-task",
    "standard": "standard path",
    "transformers": "transformers",
    "reference": "reference",
}


def demo(
    model: str | None = typer.Option(
        None, help="A model with random weights, such as deepseek-v4-flash-tiny; glm-5.2-tiny if left out."
    ),
    prompt: str | None = typer.Option(
        None, metavar="TEXT", help='Let the trained model of the package go on from a text, such as "sort banana=".'
    ),
    tokens: int = typer.Option(32, min=1, max=1024, help="How many tokens each path decodes."),
    blocks: int | None = typer.Option(None, min=1, help="Blocks of the mega-task. Any number gives the same bits."),
    device: str = typer.Option("auto", help="auto, host, hip or cuda."),
    ranks: int = typer.Option(
        0, min=0, help="Share the model among so many processes. Under torchrun: all that it has."
    ),
    nodes: int = typer.Option(
        0, min=0, help="Divide the layers among so many nodes of --ranks each. Under torchrun --nnodes: as many."
    ),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Decode a tiny model by the mega-task, the standard path and transformers, and compare.

    The tiny model has random weights, and its tokens mean nothing; with --prompt a trained one answers in text: it
    knows add, subtract, multiply, copy, reverse, sort, count and largest. With --ranks, or under torchrun: by ranks
    that share the model, by PyTorch with a collective library, and by one rank.
    """
    import torch

    from rocmega.cli.output import print_json, progress
    from rocmega.demo import answer, run
    from rocmega.errors import RequestError

    torch.set_num_threads(1)  # for matrices as small as these, threads only wait for each other
    started = int(os.environ.get("WORLD_SIZE", "1"))
    nodes = nodes or int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    several = started > 1 or ranks > 1 or nodes > 1
    if prompt is not None and (model is not None or several):
        raise RequestError("--prompt is for the trained model and one rank: leave out --model, --ranks and torchrun.")
    model = model or MODEL
    if several:
        return _demo_ranks(ranks, nodes, started, model, tokens, blocks, device, json)
    with progress(quiet=json) as show:
        if prompt is None:
            result = run(model, tokens=tokens, blocks=blocks, device=device, progress=show)
        else:
            result = answer(prompt, tokens=tokens, blocks=blocks, device=device, progress=show)
    if json:
        print_json(result.report())
    else:
        _print(result)
    if not result.agree:
        raise typer.Exit(1)


def _demo_ranks(
    ranks: int, nodes: int, started: int, model: str, tokens: int, blocks: int | None, device: str, json: bool
) -> None:
    from rocmega import demo_ranks
    from rocmega.cli.output import print_json, progress

    if started == 1:
        ranks = ranks or 1
        given = ["--model", model, "--tokens", str(tokens), "--device", device, "--ranks", str(ranks)]
        given += ["--nodes", str(nodes)]
        given += ["--blocks", str(blocks)] if blocks else []
        raise typer.Exit(demo_ranks.start(ranks * nodes, [*given, *(["--json"] if json else [])]))
    with progress(quiet=json or os.environ["RANK"] != "0") as show:
        result = demo_ranks.run(
            ranks or started // nodes, model, nodes=nodes, tokens=tokens, blocks=blocks, device=device, progress=show
        )
    if result is None:
        return
    if json:
        print_json(result.report())
    else:
        _print_ranks(result)
    if not result.agree:
        raise typer.Exit(1)


def _print_ranks(result: RanksComparison) -> None:
    from rich.table import Table

    from rocmega.cli.output import console

    out = console()
    count = len(result.runs["mega"])
    divided = f" of {result.nodes} nodes, each with a part of the layers" if result.nodes > 1 else ""
    out.print(f"{result.model}, random weights, shared by {count} ranks{divided}, greedy\n")
    out.print(f"[bold]tokens[/bold]: {' '.join(map(str, result.alone.tokens))}\n")
    table = Table("rank", "mega-task, ms a step", "standard path, ms a step", "the same tokens as one rank")
    for rank, (mega, standard) in enumerate(zip(result.runs["mega"], result.runs["standard"], strict=True)):
        same = mega.tokens == standard.tokens == result.alone.tokens
        table.add_row(
            str(rank), f"{mega.median_ms:.2f}", f"{standard.median_ms:.2f}", "yes" if same else "[red]no[/red]"
        )
    out.print(table)
    out.print(
        f"Slowest rank of the mega-task: {result.slowest}. One rank alone: {result.alone.median_ms:.2f} ms a step.\n"
        f"Launches per token, on each rank: {result.launches_per_token:g}. The sums over ranks are inside; the "
        f"standard path's are {result.carrier}'s.\nEvery rank ran on {result.where}."
    )
    if result.agree:
        out.print("[green]All agree[/green]: every rank, by both paths, chose the tokens of one rank.")
    else:
        out.print("[red]They differ[/red]: not every rank and path chose the tokens of one rank.")


def _print(result: Comparison) -> None:
    from rich.table import Table
    from rich.text import Text

    from rocmega.cli.output import console

    out = console()
    if result.text is None:
        out.print(f"{result.model}, random weights, a prompt of {len(result.prompt)} tokens, greedy\n")
    else:
        out.print(f"{result.model}, a trained model in FP8 ({len(result.prompt)} tokens of prompt), greedy\n")
    for path, run in result.runs.items():
        said = " ".join(map(str, run.tokens)) if run.text is None else f"{result.text}{run.text}"
        out.print(Text.assemble((TITLES[path], "bold"), ": ", said))
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
