"""compile() and assembly(): find a compiler, look into the cache, build."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rocmega.errors import ToolchainError
from rocmega.toolchain import recipes, store
from rocmega.toolchain.compilers import Compiler, family, find
from rocmega.toolchain.unit import Unit, source_key

Progress = Callable[[str], None]
LOG = "log.txt"


@dataclass(frozen=True)
class Artifact:
    """A compiled unit. seconds: what compiling took (then, if cached); log: commands, warnings and resource remarks."""

    path: Path
    target: str
    compiler: str
    seconds: float
    cached: bool
    log: str

    @property
    def assembly_path(self) -> Path | None:
        """The assembly text beside it, for AMD targets."""
        path = self.path.with_suffix(".s")
        return path if path.is_file() else None


def diagnostics(text: str, lines: int = 12) -> str:
    """The first errors of a compiler's output with the lines that belong to them."""
    found = text.splitlines()
    starts = [i for i, line in enumerate(found) if re.search(r"\b(fatal )?error\b[^a-z]", line)]
    keep = sorted({j for i in starts for j in range(i, min(i + 3, len(found)))}) or range(len(found))
    return "\n".join(found[i] for i in keep[:lines])


def _failure(unit: Unit, target: str, compiler: Compiler, log: str, output: str, key: str) -> ToolchainError:
    path = store.root() / "logs" / f"{unit.name}-{target}-{key[:16]}.log"
    generated = "".join(f"\n==== {name} ====\n{text}" for name, text in sorted(unit.headers.items()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(log + generated)
        where = f"The full log is in {path}."
    except OSError as error:
        where = f"The full log could not be written ({error})."
    return ToolchainError(f"{compiler} refused {unit.name} for {target}:\n{diagnostics(output)}\n{where}")


def _build(unit: Unit, target: str, compiler: Compiler, folder: Path, key: str) -> str:
    """Runs the steps in the folder and returns the log; the artifact (and assembly) stay there, the rest is removed."""
    include = folder / "include"
    include.mkdir()
    for name, text in unit.headers.items():
        (include / name).parent.mkdir(parents=True, exist_ok=True)
        (include / name).write_text(text)
    log = ""
    for step in recipes.steps(unit, target, compiler):
        try:
            done = subprocess.run(step, cwd=folder, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise ToolchainError(f"{step[0]} could not be run: {error}.") from error
        output = done.stdout + done.stderr
        log += f"$ {shlex.join(step)}\n{output}\n"
        if done.returncode:
            raise _failure(unit, target, compiler, log, output or f"error: exit code {done.returncode}", key)
    for item in folder.glob("*.o"):
        item.unlink()
    (folder / LOG).write_text(log)
    return log


def _artifact(entry: Path, unit: Unit, target: str, cached: bool) -> Artifact | None:
    manifest = store.read(entry)
    name = f"{unit.name}.{recipes.EXTENSION[family(target)]}"
    if manifest is None or name not in manifest["files"]:
        return None
    return Artifact(entry / name, target, manifest["compiler"], manifest["seconds"], cached, (entry / LOG).read_text())


def compile(
    unit: Unit, target: str, *, output_dir: Path | None = None, progress: Progress | None = None
) -> Artifact:
    """Compiles the unit for a target (`host`, `gfx942`, `gfx950`, `sm_90`), or finds it compiled in the cache.

    output_dir: also leave the files there, as `<output_dir>/<target>/<name>.*`. progress: called with a line of text
    before long work. Raises ToolchainError if there is no compiler or it refuses the source.
    """
    compiler = find(target)
    source = source_key(unit, target, recipes.flags(target, compiler.style))
    key = hashlib.sha256(f"{source} {compiler.style} {compiler.version}".encode()).hexdigest()
    entry = store.root() / target / f"{unit.name}-{key[:32]}"
    artifact = _artifact(entry, unit, target, cached=True)
    if artifact is None:
        with store.lock(key[:32]):
            artifact = _artifact(entry, unit, target, cached=True)  # another process may have built it meanwhile
            if artifact is None:
                artifact = _make(unit, target, compiler, entry, key, progress)
    return _export(artifact, Path(output_dir)) if output_dir else artifact


def _make(
    unit: Unit, target: str, compiler: Compiler, entry: Path, key: str, progress: Progress | None
) -> Artifact:
    if progress:
        progress(f"compiling {unit.name} for {target} with {compiler}")
    store.discard(entry)
    start = time.perf_counter()
    with store.workspace() as folder:
        made = folder / "made"
        made.mkdir()
        _build(unit, target, compiler, made, key)
        seconds = round(time.perf_counter() - start, 3)
        store.seal(made, {"key": key, "target": target, "compiler": str(compiler), "seconds": seconds})
        store.put(made, entry)
    artifact = _artifact(entry, unit, target, cached=False)
    if artifact is None:
        raise ToolchainError(f"{entry} was damaged while it was written: is the disk full?")
    return artifact


def _export(artifact: Artifact, output_dir: Path) -> Artifact:
    """Copies the artifact out of the cache; each file appears complete or not at all."""
    place = output_dir / artifact.target
    try:
        place.mkdir(parents=True, exist_ok=True)
        for path in (artifact.assembly_path, artifact.path):
            if path is not None:
                temporary = place / f".{path.name}.{os.getpid()}"
                shutil.copyfile(path, temporary)
                os.replace(temporary, place / path.name)
    except OSError as error:
        raise ToolchainError(f"The compiled kernel could not be written to {place}: {error}.") from error
    return Artifact(
        place / artifact.path.name, artifact.target, artifact.compiler, artifact.seconds, artifact.cached, artifact.log
    )


def assembly(unit: Unit, target: str) -> str:
    """The assembly text of the unit for an AMD target."""
    if family(target) != "amd":
        raise ToolchainError(f"Assembly text is kept for gfx942 and gfx950 only, not for {target}.")
    path = compile(unit, target).assembly_path
    if path is None:
        raise ToolchainError(f"The cache entry of {unit.name} for {target} has no assembly text.")
    return path.read_text()
