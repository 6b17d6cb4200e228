"""`rocmega inspect`: what a pack holds, or what the compiler made of the kernels."""

from __future__ import annotations

import typer

from rocmega.errors import RequestError


def inspect(
    pack: str | None = typer.Argument(
        None, metavar="[PACK]", help="A pack; or a checkpoint, or a model by name, as it would be packed."
    ),
    model: str | None = typer.Option(None, help="Its kernels instead: a checkpoint directory, or a model by name."),
    arch: str | None = typer.Option(None, help="gfx942, gfx950 or sm_90. Of kernels, gfx950 by default."),
    format: str | None = typer.Option(None, help="Of a named model's big matrices: f32, bf16, fp8 or mxfp4."),
    activations: str = typer.Option("auto", help="Of kernels: what big matrices meet, as for rocmega decode."),
    tensor_parallel_size: int | None = typer.Option(
        None, "--tensor-parallel-size", "--tp", min=1, help="How many GPUs share the model: of kernels, by default 8."
    ),
    context: int = typer.Option(8192, min=1, help="Of a pack: tokens in the cache, whose reads are counted."),
    estimate: bool = typer.Option(
        False, "--estimate", help="Of kernels for AMD: what their loops could do, and what their stages need."
    ),
    latency: float = typer.Option(800.0, min=1.0, help="Of --estimate: nanoseconds that memory is assumed to take."),
    verify: bool = typer.Option(False, "--verify", help="Of a pack: read all of it and compare checksums."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show a pack's tensors and the bytes that a step reads; or compile a model's mega-task and show what came out.

    Without PACK, the mega-task's registers, memory, instructions and cache bits.
    """
    if pack is not None:
        from rocmega.cli.packs import inspect_pack

        if model is not None or format is not None:
            raise RequestError("Give a pack, or --model with its kernels, not both.")
        inspect_pack(pack, arch=arch, tp=tensor_parallel_size, context=context, verify=verify, json=json)
    else:
        ranks = tensor_parallel_size or (1 if (model or "").endswith("-tiny") else 8)
        subject = (model or "glm-5.2", arch or "gfx950", format, ranks, activations)
        if estimate:
            _estimate(*subject, context, latency, json)
        else:
            _kernels(*subject, json)


def _estimate(
    model: str, arch: str, format: str | None, ranks: int, activations: str, context: int, latency: float, json: bool
) -> None:
    """Of one row."""
    from rocmega.cli.kernels import describe, units
    from rocmega.cli.output import console, print_json, progress
    from rocmega.inspect.estimate import DEVICES, estimate, kinds_of, tables
    from rocmega.inspect.streams import streams
    from rocmega.toolchain import assembly

    if arch not in DEVICES:
        raise RequestError(f"--estimate reads the assembly of {' and '.join(DEVICES)}, not of {arch!r}.")
    described = describe(model, format)
    config, flow = described.config, described.module("flow")
    plan = described.module("plan").plan(config, described.stored, tp=ranks, arch=arch, activations=activations)
    formats = described.module("plan").packed_formats(config, described.stored, ranks, arch, activations)
    reads = flow.stage_reads(config, formats, plan.fields.values(), 1, context)
    stage_of = {field: stage for stage, names in flow.FIELDS.items() for field in names}
    with progress(quiet=json) as show:
        show(f"compiling for {arch}")
        loops = streams(assembly(units(model, format, ranks, activations)(arch), arch))
    kinds = kinds_of(plan.fields.values(), stage_of)
    found = estimate(loops, arch, reads, kinds, config.num_hidden_layers, latency)
    if json:
        print_json({"model": model, "arch": arch, "tensor_parallel_size": ranks, **found.to_json()})
        return
    for made in tables(found):
        console().print(made)


def _kernels(model: str, arch: str, format: str | None, ranks: int, activations: str, json: bool) -> None:
    from rocmega.cli.kernels import units
    from rocmega.cli.output import console, print_json, progress
    from rocmega.inspect import report, table

    if arch not in ("gfx942", "gfx950", "sm_90"):
        raise RequestError(f"--arch {arch!r}: only kernels for GPUs can be inspected: gfx942, gfx950 or sm_90.")
    unit = units(model, format, ranks, activations)(arch)
    with progress(quiet=json) as show:
        reports = report(unit, arch, progress=show)
    if json:
        kernels = [kernel.to_json() for kernel in reports]
        print_json({"model": model, "arch": arch, "tensor_parallel_size": ranks, "kernels": kernels})
    else:
        console().print(table(reports, f"{model} for {arch}, {ranks} GPUs: {unit.name}"))
