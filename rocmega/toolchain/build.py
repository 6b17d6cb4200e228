"""compile() and assembly(): find a compiler, look into the cache, build."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rocmega.errors import ToolchainError
from rocmega.toolchain import recipes, store
from rocmega.toolchain.compilers import Compiler, family, find
from rocmega.toolchain.unit import Snapshot, Unit

Progress = Callable[[str], None]
LOG = "log.txt"


@dataclass(frozen=True)
class Artifact:
    """A compiled unit.

    seconds: what compiling took, when it was compiled. log: commands, warnings and resource remarks of that time.
    """

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
    starts = [i for i, line in enumerate(found) if re.search(r"\berror\b\s*[:#(]", line)]
    keep = sorted({j for i in starts for j in range(i, min(i + 3, len(found)))}) or range(len(found))
    return "\n".join(found[i] for i in keep[:lines])


def compile(unit: Unit, target: str, *, output_dir: Path | None = None, progress: Progress | None = None) -> Artifact:
    """Compiles the unit for a target (`host`, `gfx942`, `gfx950`, `sm_90`), or finds it compiled already.

    output_dir: also leave the files there, as `<output_dir>/<target>/<name>-<hash of the sources>.*`. A process that
    has this folder in ROCMEGA_PREBUILT (a list like PATH) uses them if its sources are the same, and needs no compiler.
    progress: called with a line of text before long work.
    Raises ToolchainError if there is no compiler or it refuses the source.
    """
    ready = _prebuilt(unit, target)
    if ready is None:
        ready = _cached_or_made(unit, target, find(target), progress)
    return _export(ready, unit, Path(output_dir)) if output_dir else ready


def assembly(unit: Unit, target: str) -> str:
    """The assembly text of the unit for an AMD target."""
    if family(target) != "amd":
        raise ToolchainError(f"Assembly text is kept for gfx942 and gfx950 only, not for {target}.")
    path = compile(unit, target).assembly_path
    if path is None:
        raise ToolchainError(f"The compiled {unit.name} for {target} came without its assembly text.")
    return path.read_text()


def _cached_or_made(unit: Unit, target: str, compiler: Compiler, progress: Progress | None) -> Artifact:
    snapshot = Snapshot.take(unit)
    source, key = _keys(snapshot, target, compiler)
    entry = store.root() / target / f"{unit.name}-{key}"
    artifact = _artifact(entry, unit, target, cached=True)
    if artifact is None:
        with store.lock(key):
            artifact = _artifact(entry, unit, target, cached=True)  # another process may have built it meanwhile
            if artifact is None:
                if progress:
                    progress(f"compiling {unit.name} for {target} with {compiler}")
                _make(snapshot, target, compiler, entry, source)
                artifact = _artifact(entry, unit, target, cached=False)
    if artifact is None:
        raise ToolchainError(f"{entry} was damaged as it was written: is the disk full, or is someone clearing it?")
    return artifact


def _keys(snapshot: Snapshot, target: str, compiler: Compiler) -> tuple[str, str]:
    """Of the sources, and of them with the compiler."""
    source = snapshot.key(target, recipes.flags(target, compiler.style))
    return source, hashlib.sha256(f"{source} {compiler.style} {compiler.version}".encode()).hexdigest()[:32]


def _make(snapshot: Snapshot, target: str, compiler: Compiler, entry: Path, source: str) -> None:
    """Builds in a folder of its own and moves the results to their place when they are complete."""
    store.discard(entry)
    with store.workspace() as folder:
        snapshot.write(folder)
        start = time.perf_counter()
        *compiling, last = recipes.steps(snapshot, target, compiler)
        log = _run_steps(compiling, snapshot, target, compiler, folder)
        if family(target) == "host":
            _bring_runtime(snapshot, compiler, folder)
        log += _run_steps([last], snapshot, target, compiler, folder)
        name = f"{snapshot.unit.name}.{recipes.EXTENSION[family(target)]}"
        if not (folder / name).is_file():
            reason = f"it ended without an error but made no {name}"
            raise _refused(snapshot.unit, target, compiler, log, reason)
        seconds = round(time.perf_counter() - start, 3)
        made = folder / "made"
        made.mkdir()
        for path in folder.glob(f"{snapshot.unit.name}.*"):
            if path.suffix != ".o":
                path.rename(made / path.name)
        (made / LOG).write_text(log)
        store.seal(made, {"source": source, "compiler": str(compiler), "seconds": seconds})
        store.put(made, entry)


def _bring_runtime(snapshot: Snapshot, compiler: Compiler, folder: Path) -> None:
    """Puts the runtime's objects into `runtime/` of the folder. They are made once for all units of a compiler."""
    runtime = snapshot.host_runtime()
    if runtime is None:
        return
    source, key = _keys(runtime, "host", compiler)
    entry = store.root() / "runtime" / key
    with store.lock(key):
        if store.read(entry) is None:
            store.discard(entry)
            with store.workspace() as place:
                runtime.write(place)
                (place / "runtime").mkdir()
                steps = recipes.runtime_steps(runtime, compiler)
                (place / "runtime" / LOG).write_text(_run_steps(steps, runtime, "host", compiler, place))
                store.seal(place / "runtime", {"source": source, "compiler": str(compiler)})
                store.put(place / "runtime", entry)
        shutil.copytree(entry, folder / "runtime")


def _run_steps(steps: list[list[str]], snapshot: Snapshot, target: str, compiler: Compiler, folder: Path) -> str:
    """Runs commands in the folder; returns the log."""
    log = ""
    for step in steps:
        try:
            done = subprocess.run(
                step, cwd=folder, capture_output=True, text=True, errors="replace", env=_environment()
            )
        except OSError as error:
            raise ToolchainError(f"{step[0]} could not be run: {error}.") from error
        output = snapshot.real_paths(done.stdout + done.stderr)
        log += f"$ {shlex.join(step)}\n{output}\n"
        if done.returncode:
            reason = output.strip() or f"exit code {done.returncode}, without a word"
            raise _refused(snapshot.unit, target, compiler, log, reason)
    return log


def _environment() -> dict[str, str]:
    """Without what adds flags behind the cache's back, and with zig's own cache beside ours, not in the home folder."""
    hidden = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CCC_OVERRIDE_OPTIONS", "CPATH", "CPLUS_INCLUDE_PATH")
    zig = {name: str(store.root() / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    return {**zig, **{name: value for name, value in os.environ.items() if name not in hidden}}


def _refused(unit: Unit, target: str, compiler: Compiler, log: str, output: str) -> ToolchainError:
    """The error for a source that does not compile. The log outlives the build folder, beside the cache."""
    generated = "".join(f"\n==== {name} ====\n{text}" for name, text in sorted(unit.headers.items()))
    path = store.root() / "logs" / f"{unit.name}-{target}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(log + generated)
        where = f"The full log is in {path}."
    except OSError as error:
        where = f"The full log could not be written ({error})."
    return ToolchainError(f"{compiler} refused {unit.name} for {target}:\n{diagnostics(output)}\n{where}")


def _artifact(entry: Path, unit: Unit, target: str, cached: bool) -> Artifact | None:
    manifest = store.read(entry)
    name = f"{unit.name}.{recipes.EXTENSION[family(target)]}"
    if manifest is None or name not in manifest["files"]:
        return None
    return Artifact(entry / name, target, manifest["compiler"], manifest["seconds"], cached, (entry / LOG).read_text())


def _prebuilt(unit: Unit, target: str) -> Artifact | None:
    """A file built ahead of time from the very same sources, with any compiler."""
    folders = [Path(f) for f in os.environ.get("ROCMEGA_PREBUILT", "").split(os.pathsep) if f]
    if not folders:
        return None
    kind = family(target)
    snapshot = Snapshot.take(unit)
    stems = [_stem(unit, snapshot.key(target, recipes.flags(target, style))) for style in recipes.STYLES[kind]]
    for place, stem in ((folder / target, stem) for folder in folders for stem in stems):
        manifest = store.read(place, f"{stem}.json")
        if manifest is not None:
            path = place / f"{stem}.{recipes.EXTENSION[kind]}"
            return Artifact(path, target, manifest["compiler"], manifest["seconds"], True, manifest["log"])
    return None


def _stem(unit: Unit, source: str) -> str:
    """The name of an exported file: units of one name but other sources, of another model say, stay apart."""
    return f"{unit.name}-{source[:16]}"


def _export(artifact: Artifact, unit: Unit, output_dir: Path) -> Artifact:
    """Copies the files out of the cache, the manifest last; each appears complete or not at all."""
    place, source = output_dir / artifact.target, artifact.path.parent
    if source.resolve() == place.resolve():
        return artifact
    manifest = store.read(source) or store.read(source, f"{artifact.path.stem}.json")
    if manifest is None:
        raise ToolchainError(f"{source} was damaged or removed while it was being copied: try again.")
    stem = _stem(unit, manifest["source"])
    paths = [p for p in (artifact.assembly_path, artifact.path) if p is not None]
    files = {f"{stem}{p.suffix}": manifest["files"][p.name] for p in paths}
    try:
        place.mkdir(parents=True, exist_ok=True)
        for path in paths:
            store.write(place / f"{stem}{path.suffix}", path.read_bytes())
        facts = {**manifest, "log": artifact.log, "files": files}
        store.write(place / f"{stem}.json", json.dumps(facts, indent=1).encode())
    except OSError as error:
        raise ToolchainError(f"The compiled kernel could not be written to {place}: {error}.") from error
    return replace(artifact, path=place / f"{stem}{artifact.path.suffix}")
