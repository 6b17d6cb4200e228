"""`rocmega build`: compile kernels ahead of time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rocmega.errors import RequestError, ToolchainError

if TYPE_CHECKING:
    from rocmega.toolchain import Artifact


def build(
    model: str = typer.Argument("glm-5.2-tiny", help="A checkpoint directory, or a model by name, such as glm-5.2."),
    arch: list[str] = typer.Option(
        [], metavar="ARCH", help="host, gfx942, gfx950 or sm_90; repeatable. By default all that have a compiler here."
    ),
    out: Path | None = typer.Option(None, metavar="DIR", help="Also leave the files here; see ROCMEGA_PREBUILT."),
    format: str | None = typer.Option(None, help="Of a named model's big matrices: f32, bf16, fp8 or mxfp4."),
    activations: str = typer.Option("auto", help="What big matrices meet: bf16, fp8 or f32, as for rocmega decode."),
    tensor_parallel_size: int = typer.Option(1, min=1, help="How many GPUs share the model."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Compile a model's mega-task, or find it in the cache."""
    from rocmega.cli.kernels import units
    from rocmega.cli.output import print_json, progress
    from rocmega.toolchain import TARGETS, compile, search

    unknown = [target for target in arch if target not in TARGETS]
    if unknown:
        raise RequestError(f"--arch {unknown[0]!r}: choose one of {', '.join(TARGETS)}.")
    unit_for, of_one_row = (
        units(model, format, tensor_parallel_size, activations, one_row=one_row) for one_row in (False, True)
    )
    missing = {} if arch else {s.target: s.install for s in map(search, TARGETS) if s.found is None}
    targets = arch or [target for target in TARGETS if target not in missing]
    if not targets:
        raise ToolchainError(f"No compiler was found for any target. {missing['host']}")
    with progress(quiet=json) as show:
        made = [
            compile(unit(target), target, output_dir=out, progress=show)
            for target in targets
            for unit in ((unit_for,) if target == "host" else (unit_for, of_one_row))
        ]
    if json:
        print_json({"model": model, "artifacts": [_report(artifact) for artifact in made], "no_compiler_for": missing})
    else:
        _print(made, missing)


def _report(artifact: Artifact) -> dict[str, Any]:
    return {
        "target": artifact.target,
        "path": str(artifact.path),
        "compiler": artifact.compiler,
        "cached": artifact.cached,
        "seconds": artifact.seconds,
    }


def _print(made: list[Artifact], missing: dict[str, str]) -> None:
    from rich.table import Table

    from rocmega.cli.output import console

    out = console()
    table = Table("target", "compiler", "took")
    table.add_column("file", overflow="fold")
    for artifact in made:
        took = "from the cache" if artifact.cached else f"{artifact.seconds:.1f} s"
        table.add_row(artifact.target, artifact.compiler, took, str(artifact.path))
    out.print(table)
    for target, install in missing.items():
        out.print(f"{target}: no compiler here. {install}", markup=False)
