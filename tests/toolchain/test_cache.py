"""The cache, over a stand-in for a compiler that counts its calls."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rocmega.errors import ToolchainError
from rocmega.toolchain import Unit, build, compile, store
from rocmega.toolchain import unit as unit_module
from tests.toolchain.conftest import FakeCompiler

ROOT = Path(__file__).parents[2]


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "host").glob("*")) if (cache / "host").exists() else []


def leftovers(cache: Path) -> list[Path]:
    return sorted((cache / "tmp").glob("*")) if (cache / "tmp").exists() else []


def test_the_second_time_nothing_is_compiled(unit: Unit, fake: FakeCompiler, cache: Path) -> None:
    said: list[str] = []
    first = compile(unit, "host", progress=said.append)
    second = compile(unit, "host", progress=said.append)
    assert (first.cached, second.cached, fake.calls) == (False, True, 1)
    assert first.path == second.path
    assert first.path.read_text() == "made by 1.0\n"
    assert said == ["compiling unit for host with fake g++ 1.0 (ROCMEGA_HOSTCXX)"]
    assert second.compiler == "fake g++ 1.0 (ROCMEGA_HOSTCXX)"
    assert "fake-g++ -std=c++17" in second.log
    assert not leftovers(cache)


def test_the_runtime_is_compiled_once_for_all_units(unit: Unit, fake: FakeCompiler, cache: Path) -> None:
    compile(unit, "host")
    sources = len(list(unit_module.hip_dir().glob("host/*.cpp")))
    assert fake.calls_for_runtime == sources
    compile(replace(unit, name="other"), "host")
    assert (fake.calls, fake.calls_for_runtime) == (2, sources)
    fake.write(version="2.0")
    compile(unit, "host")
    assert fake.calls_for_runtime == 2 * sources
    damaged = max((cache / "runtime").iterdir(), key=lambda entry: entry.stat().st_mtime) / "memory.o"
    damaged.write_text("made by 2.1\n")
    compile(replace(unit, name="third"), "host")
    assert fake.calls_for_runtime == 3 * sources
    assert damaged.read_text() == "made by 2.0\n"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda u: (u.source.parent / "beside.h").write_text("#define BESIDE 2\n") and u, id="header"),
        pytest.param(lambda u: (u.source.parent / "new.h").write_text("") is None or u, id="new file"),
        pytest.param(lambda u: u.source.write_text("int x;\n") and u, id="source"),
        pytest.param(lambda u: replace(u, headers={"generated.h": "#define GENERATED 41\n"}), id="generated"),
        pytest.param(lambda u: replace(u, headers={"other.h": "#define GENERATED 40\n"}), id="its name"),
        pytest.param(lambda u: replace(u, defines={"DEFINED": 2}), id="define"),
        pytest.param(lambda u: replace(u, name="other"), id="name"),
    ],
)
def test_what_changes_the_result_compiles_again(
    change: Callable[[Unit], Unit], unit: Unit, fake: FakeCompiler, cache: Path
) -> None:
    compile(unit, "host")
    changed = change(unit)
    assert not compile(changed, "host").cached
    assert compile(changed, "host").cached
    assert fake.calls == 2
    assert len(entries(cache)) == 2


def test_another_compiler_compiles_again(unit: Unit, fake: FakeCompiler) -> None:
    compile(unit, "host")
    fake.write(version="2.0")
    assert compile(unit, "host").path.read_text() == "made by 2.0\n"
    fake.write(version="1.0")
    assert compile(unit, "host").path.read_text() == "made by 1.0\n"
    assert fake.calls == 2


def test_a_change_anywhere_in_hip_compiles_again(
    unit: Unit, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hip = tmp_path / "hip"
    (hip / "deep" / "er").mkdir(parents=True)
    (hip / "deep" / "er" / "x.h").write_text("// 1")
    monkeypatch.setattr(unit_module, "hip_dir", lambda: hip)
    compile(unit, "host")
    (hip / "notes.md").write_text("not a source")
    assert compile(unit, "host").cached
    (hip / "deep" / "er" / "x.h").write_text("// 2")
    assert not compile(unit, "host").cached
    (hip / "deep" / "er" / "x.h").rename(hip / "deep" / "x.h")
    assert not compile(unit, "host").cached
    assert fake.calls == 3


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda e: (e / "unit.so").write_text("made by 1.1\n"), id="other bytes of the same size"),
        pytest.param(lambda e: (e / "unit.so").write_text(""), id="truncated"),
        pytest.param(lambda e: (e / "unit.so").unlink(), id="missing"),
        pytest.param(lambda e: (e / "log.txt").unlink(), id="log missing"),
        pytest.param(lambda e: (e / store.MANIFEST).unlink(), id="no manifest"),
        pytest.param(lambda e: (e / store.MANIFEST).write_text('{"files": {'), id="half a manifest"),
        pytest.param(lambda e: (e / store.MANIFEST).write_text("[]"), id="another manifest"),
        pytest.param(lambda e: (e / store.MANIFEST).write_text('{"files": {}}'), id="an empty manifest"),
        pytest.param(lambda e: (e / store.MANIFEST).write_bytes(b"\xff\xfe"), id="a binary manifest"),
        pytest.param(lambda e: (shutil.rmtree(e), e.write_text("a file")), id="a file in its place"),
    ],
)
def test_a_damaged_entry_is_made_again(
    damage: Callable[[Path], object], unit: Unit, fake: FakeCompiler, cache: Path
) -> None:
    good = compile(unit, "host")
    damage(good.path.parent)
    again = compile(unit, "host")
    assert (again.cached, fake.calls) == (False, 2)
    assert again.path.read_text() == "made by 1.0\n"
    assert compile(unit, "host").cached
    assert len(entries(cache)) == 1
    assert not leftovers(cache)


def test_a_failed_build_leaves_nothing(unit: Unit, fake: FakeCompiler, cache: Path) -> None:
    fake.write(extra='echo "unit.hip:3:1: error: no good"; echo "  3 | code"; echo "    ^"; echo note >&2; exit 1')
    with pytest.raises(ToolchainError) as caught:
        compile(unit, "host")
    message = str(caught.value)
    assert "fake g++ 1.0 (ROCMEGA_HOSTCXX) refused unit for host:" in message
    assert "unit.hip:3:1: error: no good\n  3 | code\n    ^" in message
    assert not entries(cache)
    assert not leftovers(cache)
    [log] = (cache / "logs").iterdir()
    assert str(log) in message
    assert "note" in log.read_text()
    assert "#define GENERATED 40" in log.read_text()


def test_a_compiler_that_writes_nothing(unit: Unit, fake: FakeCompiler, cache: Path) -> None:
    fake.write(extra="exit 0")
    with pytest.raises(ToolchainError, match=r"made no unit\.so"):
        compile(unit, "host")
    assert not entries(cache)


def run(unit: Unit, count: int, **environment: str) -> list[subprocess.Popen[str]]:
    """Processes that all compile the unit at once."""
    code = (
        "import sys; from pathlib import Path; from rocmega.toolchain import Unit, compile\n"
        f"unit = Unit('unit', Path({str(unit.source)!r}), {dict(unit.headers)!r}, {dict(unit.defines)!r})\n"
        "a = compile(unit, 'host')\n"
        "print(a.path); print(a.cached); print(a.path.read_text(), end='')"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return [
        subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, env=env) for _ in range(count)
    ]


def test_two_processes_build_it_once(unit: Unit, fake: FakeCompiler, cache: Path) -> None:
    fake.write(extra="sleep 0.7")
    outputs = [p.communicate(timeout=60)[0].split("\n") for p in run(unit, 2)]
    assert sorted(o[1] for o in outputs) == ["False", "True"]
    assert {(o[0], o[2]) for o in outputs} == {(str(entries(cache)[0] / "unit.so"), "made by 1.0")}
    assert fake.calls == 1
    assert not leftovers(cache)


def test_without_locks_both_build_and_one_result_stays(
    unit: Unit, fake: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without locks: while this process builds, another completes the same entries."""
    monkeypatch.setattr(store, "lock", lambda name: contextlib.nullcontext())
    put, others = store.put, []

    def late(folder: Path, entry: Path) -> None:
        shutil.copytree(folder, entry)
        others.append(entry)
        put(folder, entry)

    monkeypatch.setattr(store, "put", late)
    artifact = compile(unit, "host")
    assert [artifact.path.parent] == others[1:] == entries(cache)
    assert artifact.path.read_text() == "made by 1.0\n"
    assert not leftovers(cache)


def test_a_killed_build_leaves_no_entry(unit: Unit, fake: FakeCompiler, cache: Path) -> None:
    fake.write(extra="sleep 30")
    [process] = run(unit, 1)
    deadline = time.time() + 30
    while not fake.calls and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    assert not entries(cache)
    [left] = leftovers(cache)
    fake.write()
    assert not compile(unit, "host").cached
    assert left.exists()  # it may be another process's work in progress
    os.utime(left, (0, 0))
    compile(replace(unit, name="other"), "host")
    assert not leftovers(cache)


def test_sources_that_change_while_they_are_compiled(unit: Unit, fake: FakeCompiler) -> None:
    """The entry's name is of what was compiled, not of what the files hold by then."""
    header = unit.source.parent / "beside.h"
    fake.write(extra=f'echo "#define BESIDE 5" > "{header}"; cat src/unit/beside.h > "{fake.folder}/seen"')
    first = compile(unit, "host")
    assert (fake.folder / "seen").read_text() == "#define BESIDE 1\n"
    assert compile(unit, "host").path != first.path
    assert (fake.folder / "seen").read_text() == "#define BESIDE 5\n"
    header.write_text("#define BESIDE 1\n")
    assert compile(unit, "host").path == first.path
    assert fake.calls == 2


def test_ahead_of_time(unit: Unit, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    made = compile(unit, "host", output_dir=out)
    assert made.path.parent == out / "host"
    assert {p.name for p in (out / "host").iterdir()} == {made.path.name, f"{made.path.stem}.json"}
    assert made.path.read_text() == "made by 1.0\n"

    monkeypatch.setenv("ROCMEGA_PREBUILT", os.pathsep.join([str(tmp_path / "nowhere"), str(out)]))
    monkeypatch.setenv("ROCMEGA_HOSTCXX", "no-such-compiler")
    found = compile(unit, "host")
    assert (found.path, found.cached, found.compiler) == (made.path, True, made.compiler)
    assert "fake-g++" in found.log
    assert compile(unit, "host", output_dir=out).path == made.path
    assert compile(unit, "host", output_dir=tmp_path / "copy").path.read_text() == "made by 1.0\n"
    with pytest.raises(ToolchainError, match="no-such-compiler"):
        compile(replace(unit, defines={}), "host")
    monkeypatch.setenv("ROCMEGA_HOSTCXX", str(fake.path))
    other = compile(replace(unit, defines={}), "host", output_dir=out)
    assert other.path != made.path
    assert compile(unit, "host").path == made.path
    monkeypatch.setenv("ROCMEGA_HOSTCXX", "no-such-compiler")
    made.path.write_text("made by 1.1\n")
    with pytest.raises(ToolchainError, match="no-such-compiler"):
        compile(unit, "host")


def test_ahead_of_time_into_a_place_that_cannot_be(unit: Unit, fake: FakeCompiler, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolchainError, match="could not be written"):
        compile(unit, "host", output_dir=tmp_path / "file" / "out")


def test_a_cache_that_cannot_be_written(
    unit: Unit, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROCMEGA_CACHE", str(tmp_path / "file"))
    with pytest.raises(ToolchainError, match="Set ROCMEGA_CACHE to a folder"):
        compile(unit, "host")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCMEGA_CACHE", "/somewhere")
    assert store.root() == Path("/somewhere")
    monkeypatch.delenv("ROCMEGA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert store.root() == Path("/xdg/rocmega")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.root() == Path.home() / ".cache" / "rocmega"


def test_the_manifest_says_what_is_there(unit: Unit, fake: FakeCompiler) -> None:
    manifest = json.loads((compile(unit, "host").path.parent / store.MANIFEST).read_text())
    assert set(manifest["files"]) == {"unit.so", "log.txt"}
    assert manifest["files"]["unit.so"][0] == len("made by 1.0\n")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b"])
def test_names_that_are_no_file_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="cannot be a file name"):
        Unit(name, tmp_path / "x.hip")


@pytest.mark.parametrize("name", ["../x.h", "/etc/x.h", "a/../../x.h"])
def test_generated_headers_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="relative path"):
        Unit("unit", tmp_path / "x.hip", headers={name: ""})


def test_missing_source_and_unknown_target(tmp_path: Path, fake: FakeCompiler) -> None:
    with pytest.raises(ToolchainError, match="does not exist"):
        compile(Unit("unit", tmp_path / "missing.hip"), "host")
    with pytest.raises(ToolchainError, match="no target 'gfx90a'; the targets are host, gfx942, gfx950, sm_90"):
        compile(Unit("unit", tmp_path / "missing.hip"), "gfx90a")


def test_first_errors_of_a_long_output() -> None:
    text = "\n".join(f"a.h:{i}:1: warning: odd\n  code\n  ^" for i in range(30))
    text += (
        "\nb.h:1:2: error: bad\n  line\n   ^\nc.h:2:2: fatal error: worse\n  line\n   ^\n1 warning, 2 errors generated."
    )
    shown = build.diagnostics(text)
    assert shown.splitlines()[0] == "b.h:1:2: error: bad"
    assert "c.h:2:2: fatal error: worse" in shown
    assert "warning: odd" not in shown
    assert build.diagnostics("nothing of note\n" * 40).count("\n") == 11
