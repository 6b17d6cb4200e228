"""`rocmega inspect`: what the compiler made of the kernels."""

from __future__ import annotations

import typer

from rocmega.errors import RequestError


def inspect(
    model: str = typer.Option("glm-5.2", help="A checkpoint directory, or a model by name."),
    arch: str = typer.Option("gfx950", help="gfx942, gfx950 or sm_90."),
    format: str | None = typer.Option(None, help="Of a named model's big matrices: f32, bf16 or fp8."),
    tensor_parallel_size: int | None = typer.Option(None, min=1, help="How many GPUs share the model: by default 8."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Compile a model's mega-task and show its registers, memory, instructions and cache bits."""
    from rocmega.cli.kernels import units
    from rocmega.cli.output import console, print_json, progress
    from rocmega.inspect import report, table

    if arch not in ("gfx942", "gfx950", "sm_90"):
        raise RequestError(f"--arch {arch!r}: only kernels for GPUs can be inspected: gfx942, gfx950 or sm_90.")
    ranks = tensor_parallel_size or (1 if model.endswith("-tiny") else 8)
    unit = units(model, format, ranks)(arch)
    with progress(quiet=json) as show:
        reports = report(unit, arch, progress=show)
    if json:
        kernels = [kernel.to_json() for kernel in reports]
        print_json({"model": model, "arch": arch, "tensor_parallel_size": ranks, "kernels": kernels})
    else:
        console().print(table(reports, f"{model} for {arch}, {ranks} GPUs: {unit.name}"))
