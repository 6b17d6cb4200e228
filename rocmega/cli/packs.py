"""`rocmega inspect PACK`: what a pack holds, what a step reads of it, and how fast memory lets that be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.errors import RequestError

if TYPE_CHECKING:
    from rocmega.packing.plan import Field
    from rocmega.packing.traffic import Traffic

CONTEXT = 8192


def inspect_pack(target: str, *, arch: str | None, tp: int | None, context: int, verify: bool, json: bool) -> None:
    """A finished pack, or what a checkpoint or a model by name would be packed to."""
    from rocmega.cli.output import print_json

    reports = _packs(Path(target), verify, json) if _is_pack(target) else [_planned(target, arch, tp or 1)]
    shown = [{**about, **_traffic(about, fields, context).to_json()} for about, fields in reports]
    if json:
        print_json({"packs": shown} if _is_pack(target) else shown[0])
        return
    about, fields = reports[0]
    if len(reports) > 1:
        _print_ranks(shown)
    _print(about, _traffic(about, fields, context))


def first_rank(target: str, arch: str | None, tp: int) -> Report:
    """What rank 0 of a pack holds; or, of a checkpoint or a model by name, what it would hold."""
    return _packs(Path(target), False, True)[0] if _is_pack(target) else _planned(target, arch, tp)


def _is_pack(target: str) -> bool:
    from rocmega.packing import is_pack

    return is_pack(Path(target))


Report = tuple[dict[str, Any], "list[Field]"]


def _packs(directory: Path, verify: bool, quiet: bool) -> list[Report]:
    from rocmega.cli.output import progress
    from rocmega.packing import open_pack
    from rocmega.packing.loader import rank_folders

    out = []
    for folder in rank_folders(directory).values() or [directory]:
        pack = open_pack(folder)
        if verify:
            with progress(quiet=quiet, in_bytes=True) as show:
                pack.verify(show)
        about = {"model": str(folder), "arch": pack.arch, "tp": pack.tp, "rank": pack.rank, "formats": pack.formats}
        about |= {"verified": verify, "config": pack.manifest["config"], "source": pack.manifest["source"]["id"]}
        out.append((about, list(pack.fields.values())))
    return out


def _planned(target: str, arch: str | None, tp: int) -> Report:
    from rocmega import registry
    from rocmega.checkpoint import Checkpoint

    if target in registry.preset_names():
        raw = registry.presets_of(target).preset(target)
        weights = registry.family_module(raw["model_type"], "weights")
        config = registry.family_module(raw["model_type"], "config").from_dict(raw)
        stored = weights.published_formats(config)
    elif Path(target).is_dir():
        raw, config = registry.read_config(target), registry.load_config(target)
        weights = registry.family_module(raw["model_type"], "weights")
        stored = weights.check(Checkpoint(target), config)
    else:
        known = ", ".join(registry.preset_names())
        raise RequestError(f"{target!r} is neither a pack, nor a checkpoint, nor one of {known}.")
    plan = weights.plan(config, stored, tp=tp, arch=arch)
    about = {"model": target, "arch": arch or "any", "tp": tp, "rank": 0, "formats": plan.formats, "config": raw}
    return about, list(plan.fields.values())


def _traffic(about: dict[str, Any], fields: list[Field], context: int) -> Traffic:
    from rocmega import registry
    from rocmega.packing.traffic import Traffic, lines

    family = about["config"]["model_type"]
    config = registry.family_module(family, "config").from_dict(about["config"])
    formats = registry.family_module(family, "weights").Formats(**about["formats"])
    cache = registry.family_module(family, "traffic").cache_reads(config, formats, context)
    return Traffic(lines(fields), cache, context)


def _print_ranks(shown: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    from rocmega.cli.output import console

    table = Table("pack", "architecture", "GB", box=box.SIMPLE_HEAD)
    for entry in shown:
        table.add_row(Path(entry["model"]).name, entry["arch"], f"{entry['bytes'] / 1e9:.3f}")
    console().print(table)


def _print(about: dict[str, Any], traffic: Traffic) -> None:
    from rich import box
    from rich.table import Table

    from rocmega.cli.output import console
    from rocmega.packing.traffic import ROWS

    out = console()
    unit, name = (1e9, "GB") if traffic.bytes >= 1e9 else (1e6, "MB")
    title = f"{about['model']}: rank {about['rank']} of {about['tp']} for {about['arch']}, in {name}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True)
    for column in ("tensor", "format", "one matrix"):
        table.add_column(column, no_wrap=True)
    for column in ("held", *(f"M={rows}" for rows in ROWS)):
        table.add_column(column, justify="right", no_wrap=True)

    def add(label: str, format: str, shape: str, *sizes: float) -> None:
        table.add_row(label, format, shape, *(f"{size / unit:.3f}" for size in sizes))

    plain = [line for line in traffic.lines if not line.matrices and line.reads[ROWS[0]] == line.bytes]
    for line in traffic.lines:
        if line not in plain:
            shape = "x".join(map(str, line.shape)) + (" *" if line.split else "")
            add(line.name + (" (host)" if line.host else ""), line.format, shape, line.bytes, *line.reads.values())
    small = [sum(line.reads[rows] for line in plain) for rows in ROWS]
    add("norms, biases", "f32", "", sum(line.bytes for line in plain), *small)
    table.add_section()
    for label, size in traffic.cache.items():
        table.add_row(label, "", f"context {traffic.context}", "", *(f"{size * n / unit:.3f}" for n in ROWS))
    table.add_section()
    add("all", "", "", traffic.bytes, *(traffic.step(rows) for rows in ROWS))
    out.print(table)
    out.print("Held, and read by a step of M rows. *: a rank's part, the rest is with other ranks.")
    if traffic.host_bytes:
        out.print("(host): in host memory, and not in the sum of what is held.")
    title = "ms per step at least; tok/s at most"
    limits = Table("device", "TB/s", *(f"M={rows}" for rows in ROWS), box=box.SIMPLE_HEAD, title=title)
    by_device: dict[str, list[dict[str, Any]]] = {}
    for entry in traffic.limits():
        by_device.setdefault(entry["device"], []).append(entry)
    for device, entries in by_device.items():
        cells = [f"{entry['ms']:.3f} ms; {entry['tokens_per_second']:.0f}" for entry in entries]
        limits.add_row(device, f"{entries[0]['bandwidth'] / 1e12:g}", *cells)
    out.print(limits)
    out.print("By the data sheets' memory bandwidth. docs/packing.md says what is counted and what is not.")
