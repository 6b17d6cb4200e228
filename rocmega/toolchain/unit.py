"""What is compiled: a source with its generated headers and defines, and the hash of all that can change the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rocmega.errors import ToolchainError

SUFFIXES = (".h", ".hpp", ".hip", ".cpp", ".c", ".cu", ".cuh", ".inc", ".S")
MAX_FILES = 2000


def package() -> Path:
    import rocmega

    return Path(rocmega.__file__).resolve().parent


def hip_dir() -> Path:
    """The device sources, `hip/`."""
    return (package() / "hip").resolve()


def models_dir() -> Path:
    """The model families, `models/`."""
    return (package() / "models").resolve()


@dataclass(frozen=True)
class Unit:
    """One kernel source to compile.

    name: of the resulting files, letters, digits, `.`, `_` and `-`. source: a .hip file. headers: generated headers,
    file name -> text, first on the include path. defines: macro -> value.
    """

    name: str
    source: Path
    headers: Mapping[str, str] = field(default_factory=dict)
    defines: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "._-" for c in self.name) or self.name.startswith("."):
            raise ToolchainError(
                f"The unit name {self.name!r} cannot be a file name: use letters, digits, '.', '_', '-'."
            )
        for name in self.headers:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ToolchainError(
                    f"The generated header {name!r} of unit {self.name} must be a relative path without '..'."
                )

    def define_flags(self) -> list[str]:
        return [f"-D{name}={value}" for name, value in sorted(self.defines.items())]


def _files(folder: Path) -> Iterator[Path]:
    found = (p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    for count, path in enumerate(found):
        if count == MAX_FILES:
            raise ToolchainError(
                f"{folder} holds more than {MAX_FILES} source files: put the kernel into a folder of its own."
            )
        yield path


def source_key(unit: Unit, target: str, flags: Sequence[str]) -> str:
    """Hash of everything but the compiler: all files the unit can include, generated headers, defines, flags."""
    source = Path(unit.source).resolve()
    if not source.is_file():
        raise ToolchainError(f"The kernel source {unit.source} of unit {unit.name} does not exist.")
    roots = {"hip": hip_dir(), "models": models_dir()}
    if not source.is_relative_to(roots["hip"]) and not source.is_relative_to(roots["models"]):
        roots["unit"] = source.parent
    digest = hashlib.sha256()

    def add(name: str, content: bytes) -> None:
        digest.update(f"{len(name)}:{name}:{len(content)}:".encode())
        digest.update(content)

    label = next(f"{n}/{source.relative_to(r)}" for n, r in roots.items() if source.is_relative_to(r))
    add("recipe", json.dumps([4, unit.name, label, target, list(flags), unit.define_flags()]).encode())
    for name, text in sorted(unit.headers.items()):
        add(f"generated/{name}", text.encode())
    for name, root in roots.items():
        for path in sorted(_files(root)):
            add(f"{name}/{path.relative_to(root)}", path.read_bytes())
    return digest.hexdigest()
