"""The packages themselves, over stand-ins for the vendors' libraries: do they take what our drivers hand them?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rocmega.toolchain import search

STUBS = Path(__file__).parent / "stubs"
ROOT = Path(__file__).parents[2]
LIBRARY = {"hip": "libamdhip64.so", "cuda": "libcuda.so.1"}
PACKAGE = {"hip": "rocm.bindings.hip", "cuda": "cuda.bindings.driver"}


def drive(kind: str, folder: Path) -> list[str]:
    pytest.importorskip(PACKAGE[kind])
    found = search("host").found
    if found is None:
        pytest.skip("no host compiler")
    library = folder / LIBRARY[kind]
    command = [*found.command, "-x", "c++", "-fPIC", "-shared", str(STUBS / f"{kind}.cpp"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    env = {**os.environ, "STUB": str(library), "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-u", str(STUBS / "drive.py"), kind, str(folder)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", ["hip", "cuda"])
def test_the_package_takes_what_the_driver_hands_it(kind: str, tmp_path: Path) -> None:
    said = drive(kind, tmp_path)
    for line in (
        "image IMAGE",
        "lds 4711 8 5",
        "occupancy 4711 256 5",
        "launch 4711 4 1 1 256 1 1 5 stream 99 argument 7f0012345678",
        "launch 4711 4 1 1 256 1 1 0 stream 0 argument 7f0012345678",
        f"{tmp_path}/k.bin has no kernel 'other': was it built from another source?",
        "zeroed True",
        "mapped True True",
        "open 1 last 7",
        "handle 64 7 True",
        "close",
        "unload 77",
    ):
        assert line in said
    facts = next(line for line in said if line.startswith("DeviceFacts"))
    if kind == "hip":
        assert "name='Stub MI300X', arch='gfx942', compute_units=8," in facts
        assert {"flags 3", "set 1", "host memory 40000002"} <= set(said)
    else:
        assert "name='Stub H200', arch='sm_90', compute_units=8, memory_bytes=12345" in facts
        assert {"context 55", "host memory 2"} <= set(said)
        assert said[-1] == "release 1"
