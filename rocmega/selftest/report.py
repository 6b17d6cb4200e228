"""What a self test found: one result a check, for people, for machines, and as a file to attach to a bug report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rocmega.errors import RequestError

State = Literal["ok", "failed", "skipped", "running"]


@dataclass(frozen=True)
class Result:
    """One check. message: what was seen, or what is wrong; details: a failure's traceback; values: for machines."""

    name: str
    state: State
    message: str
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    details: str = ""


@dataclass
class Report:
    """environment: device, driver and versions; doctor: what `rocmega doctor` found."""

    environment: dict[str, Any] = field(default_factory=dict)
    doctor: list[dict[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Nothing failed, and something ran."""
        return all(result.state in ("ok", "skipped") for result in self.results) and any(
            result.state == "ok" for result in self.results
        )

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "passed": self.passed,
            "environment": self.environment,
            "checks": [asdict(result) for result in self.results],
            "doctor": self.doctor,
        }

    def text(self) -> str:
        """Everything, for people who read it elsewhere."""
        lines = ["rocmega selftest: " + ("passed" if self.passed else "FAILED"), ""]
        lines += [f"{name}: {value}" for name, value in self.environment.items()]
        for result in self.results:
            lines += ["", f"[{result.state}] {result.name} ({result.seconds:.1f} s)", result.message]
            lines += [f"  {name}: {value}" for name, value in result.values.items()]
            lines += [result.details] if result.details else []
        lines += ["", "doctor:"]
        for found in self.doctor:
            lines.append(f"  {found['state']:8}{found['name']}: {found['detail']}; {found['cost']}".rstrip("; "))
        return "\n".join(lines) + "\n"

    def write(self, file: Path) -> None:
        """As JSON if the name ends so, else as text. Raises RequestError if it cannot be written."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) if file.suffix == ".json" else self.text()
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RequestError(f"--report {file} could not be written: {error}.") from None
