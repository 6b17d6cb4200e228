"""`rocmega doctor`: what this machine has."""

from __future__ import annotations

import typer


def doctor(json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
    """Show compilers, torch, devices and packages, and what each missing piece costs."""
    from rocmega.cli.output import console, print_json, progress
    from rocmega.doctor import collect, table

    with progress(quiet=json) as show:
        show("looking around")
        findings = collect()
    if json:
        print_json({"findings": [finding.to_json() for finding in findings]})
    else:
        console().print(table(findings))
