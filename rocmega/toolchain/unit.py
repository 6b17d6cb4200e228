"""What is compiled: a source with its generated headers and defines, and all the files that it can include."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rocmega.errors import ToolchainError

SUFFIXES = (".h", ".hpp", ".hip", ".cpp", ".c", ".cu", ".cuh", ".inc", ".S")
MAX_FILES = 2000
RECIPE = 6  # counts up when the steps change in a way that the flags do not show


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


@dataclass(frozen=True)
class Snapshot:
    """The sources of a unit as they were when they were read, once: the hash and the compiler see the same bytes.

    files: `hip/...`, `models/...` or `unit/...` -> content; source: the unit's own among them; roots: where those
    folders really are.
    """

    unit: Unit
    source: str
    files: Mapping[str, bytes]
    roots: Mapping[str, Path]

    @classmethod
    def take(cls, unit: Unit) -> Snapshot:
        """Reads hip/, models/ and the unit's own folder. Raises ToolchainError if the source does not exist."""
        source = Path(unit.source).resolve()
        if not source.is_file():
            raise ToolchainError(f"The kernel source {unit.source} of unit {unit.name} does not exist.")
        roots = {"hip": hip_dir(), "models": models_dir()}
        if not any(source.is_relative_to(root) for root in roots.values()):
            roots["unit"] = source.parent
        try:
            files = {f"{n}/{p.relative_to(r)}": p.read_bytes() for n, r in roots.items() for p in sorted(_files(r))}
        except OSError as error:
            raise ToolchainError(f"The sources of unit {unit.name} cannot be read: {error}.") from error
        label = next(f"{n}/{source.relative_to(r)}" for n, r in roots.items() if source.is_relative_to(r))
        return cls(unit, label, files, roots)

    def key(self, target: str, flags: Sequence[str]) -> str:
        """Hash of everything but the compiler: files, generated headers, defines, flags."""
        unit, digest = self.unit, hashlib.sha256()
        recipe = json.dumps([RECIPE, unit.name, self.source, target, list(flags), unit.define_flags()])
        generated = {f"generated/{name}": text.encode() for name, text in unit.headers.items()}
        for name, content in sorted({"recipe": recipe.encode(), **generated, **self.files}.items()):
            digest.update(f"{len(name)}:{name}:{len(content)}:".encode())
            digest.update(content)
        return digest.hexdigest()

    def host_runtime(self) -> Snapshot | None:
        """hip/host alone, which includes nothing else and so is the same for all units; None if there is none."""
        files = {name: content for name, content in self.files.items() if name.startswith("hip/host/")}
        source = next((name for name in sorted(files) if name.endswith(".cpp")), None)
        if source is None:
            return None
        unit = Unit("runtime", self.roots["hip"].parent / source)
        return Snapshot(unit, source, files, self.roots)

    def write(self, folder: Path) -> None:
        """Puts the files into src/ and the generated headers into include/."""
        generated = {f"include/{name}": text.encode() for name, text in self.unit.headers.items()}
        for name, content in {**{f"src/{n}": c for n, c in self.files.items()}, **generated}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def real_paths(self, text: str) -> str:
        """A compiler's output with the places where a person finds the files."""
        return re.sub(
            r"\bsrc/(hip|models|unit)/", lambda m: f"{self.roots[m[1]]}/" if m[1] in self.roots else m[0], text
        )


def source_key(unit: Unit, target: str, flags: Sequence[str]) -> str:
    """The hash of a unit's sources as they are now; see Snapshot.key."""
    return Snapshot.take(unit).key(target, flags)
