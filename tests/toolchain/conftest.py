from __future__ import annotations

from pathlib import Path

import pytest

from rocmega.toolchain import Unit

# What a compiler must do for the cache to be tested without one: answer --version, and write its output.
SCRIPT = """#!/bin/sh
case "$1" in --version) echo "fake g++ {version}"; exit 0;; esac
echo "$*" >> "{folder}/calls"
case "$*" in *src/hip/host/*) ;; *)
{extra}
;; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && out="$2"; shift; done
echo "made by {version}" > "$out"
"""


class FakeCompiler:
    """A host compiler that counts its calls: those that compile a unit, and those for the runtime."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.path = folder / "fake-g++"
        self.write()
        monkeypatch.setenv("ROCMEGA_HOSTCXX", str(self.path))

    def write(self, version: str = "1.0", extra: str = "") -> None:
        from rocmega.toolchain import compilers

        self.path.write_text(SCRIPT.format(version=version, folder=self.folder, extra=extra))
        self.path.chmod(0o755)
        compilers._output.cache_clear()

    @property
    def calls(self) -> int:
        return sum("src/hip/host/" not in call for call in self._compilations())

    @property
    def calls_for_runtime(self) -> int:
        return sum("src/hip/host/" in call for call in self._compilations())

    def _compilations(self) -> list[str]:
        path = self.folder / "calls"
        return [call for call in path.read_text().splitlines() if " -c " in call] if path.exists() else []


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test, and no settings from outside."""
    for name in ("ROCMEGA_HOSTCXX", "ROCMEGA_AMDCLANG", "ROCMEGA_NVCC", "ROCMEGA_PREBUILT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROCMEGA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    return FakeCompiler(tmp_path, monkeypatch)


@pytest.fixture
def unit(tmp_path: Path) -> Unit:
    """A source with a header beside it and a generated one."""
    folder = tmp_path / "unit"
    folder.mkdir()
    (folder / "beside.h").write_text("#define BESIDE 1\n")
    (folder / "unit.hip").write_text(
        '#include "beside.h"\n#include "generated.h"\n'
        'extern "C" int answer() { return BESIDE + GENERATED + DEFINED; }\n'
    )
    return Unit("unit", folder / "unit.hip", headers={"generated.h": "#define GENERATED 40\n"}, defines={"DEFINED": 1})
