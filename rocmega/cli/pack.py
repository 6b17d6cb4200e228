"""`rocmega pack`: a checkpoint as each rank's kernels read it."""

from __future__ import annotations

import time
from pathlib import Path

import typer


def pack(
    checkpoint: Path = typer.Argument(..., metavar="CHECKPOINT", help="config.json and safetensors, as published."),
    arch: str = typer.Option(..., help="What will run it: gfx942, gfx950, sm_90 or host."),
    out: Path = typer.Option(..., metavar="DIR", help="Where the packs go: DIR/rank-R-of-N for each rank."),
    tp: int = typer.Option(1, "--tp", "--tensor-parallel-size", min=1, help="How many GPUs will share the model."),
    rank: list[int] = typer.Option([], min=0, help="Only this rank; repeatable. By default all, in one pass."),
    threads: int | None = typer.Option(None, min=1, help="By default one for each core."),
    verify: bool = typer.Option(
        False,
        "--verify",
        help="Compare the files with their published digests first, where those are here.",
    ),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Pack a checkpoint's weights for an architecture. Interrupted, the same command goes on where it was."""
    from rocmega.checkpoint import Checkpoint
    from rocmega.cli.output import console, print_json, progress
    from rocmega.packing import open_pack, pack_checkpoint
    from rocmega.packing.source import check_published

    unknown: list[str] = []
    start = time.perf_counter()
    with progress(quiet=json, in_bytes=True) as show:
        if verify:
            unknown = check_published(Checkpoint(checkpoint), show)
        folders = pack_checkpoint(checkpoint, out, arch=arch, tp=tp, ranks=rank or None, threads=threads, progress=show)
    seconds, packs = time.perf_counter() - start, [open_pack(folder) for folder in folders]
    if json:
        entries = [{"rank": made.rank, "path": str(made.directory), "bytes": made.bytes()} for made in packs]
        print_json({"arch": arch, "tp": tp, "packs": entries, "seconds": seconds, "no_published_digest": unknown})
        return
    for made in packs:
        console().print(f"{made.directory}: {made.bytes() / 1e9:.2f} GB for {arch}", soft_wrap=True, markup=False)
    if unknown:
        console().print(f"No published digest is here for {', '.join(unknown)}.", markup=False)
