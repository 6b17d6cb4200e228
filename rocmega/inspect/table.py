"""The reports as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rocmega.inspect.kernels import INSTRUCTION_CACHE, KernelReport

if TYPE_CHECKING:
    from rich.table import Table


def _lines(counts: Mapping[str, int]) -> str:
    return "\n".join(f"{number:4d} {name}" for name, number in sorted(counts.items())) or "none"


def _flagged(text: str, bad: bool) -> str:
    return f"[red]{text}[/red]" if bad else text


def rows(kernel: KernelReport) -> list[tuple[str, str]]:
    """(what, value) pairs, with rich markup where a value is a problem."""
    if kernel.arch == "sm_90":
        registers = [("registers a thread", str(kernel.vgpr))]
        spilled = f"{kernel.vgpr_spills} bytes"
    else:
        registers = [
            ("VGPR, AGPR, SGPR", f"{kernel.vgpr}, {kernel.agpr}, {kernel.sgpr}"),
            ("waves per SIMD", f"{kernel.waves_per_simd} by registers"),
            ("blocks per CU", _flagged(str(kernel.blocks_per_cu), kernel.blocks_per_cu < 1)),
        ]
        spilled = f"{kernel.vgpr_spills} vector, {kernel.sgpr_spills} scalar (kept in vector lanes)"
    size = f"{kernel.code_bytes} bytes, {kernel.icache_share:.0%} of the {INSTRUCTION_CACHE >> 10} KB instruction cache"
    result = [
        *registers,
        ("LDS", _flagged(f"{kernel.lds_bytes} of {kernel.lds_limit} bytes", kernel.lds_bytes > kernel.lds_limit)),
        ("scratch", _flagged(f"{kernel.scratch_bytes} bytes a lane", kernel.scratch_bytes > 0)),
        ("spilled registers", _flagged(spilled, kernel.vgpr_spills > 0)),
        ("code", f"{kernel.code_bytes} bytes" if kernel.arch == "sm_90" else size),
        ("instructions", str(kernel.instructions) if kernel.instructions else "not counted"),
        ("matrix instructions", _lines(kernel.mfma)),
        ("loads", _lines(kernel.load_widths)),
    ]
    if kernel.arch == "sm_90":
        return result
    waited = f"{kernel.wbl2_waited} of {kernel.wbl2} waited for at once"
    if kernel.unwaited_lines:
        waited += f"; not those on lines {', '.join(map(str, kernel.unwaited_lines))} of the assembly"
    return [
        *result,
        ("LDS accesses", _lines(kernel.lds_widths)),
        ("accesses with cache bits", _lines(kernel.scoped)),
        ("flat accesses", _flagged(str(kernel.flat_accesses), kernel.flat_accesses > 0)),
        ("L2 write-backs", _flagged(waited, kernel.wbl2_waited < kernel.wbl2)),
    ]


def table(reports: Sequence[KernelReport], title: str = "kernels") -> Table:
    """One section per kernel; print it with rich."""
    from rich.table import Table

    made = Table(title=title, show_header=False, title_justify="left")
    made.add_column(no_wrap=True)
    made.add_column()
    for kernel in reports:
        made.add_row(f"[bold]{kernel.name}[/bold]", f"[bold]{kernel.arch}[/bold]")
        for what, value in rows(kernel):
            made.add_row(what, value)
        made.add_section()
    return made
