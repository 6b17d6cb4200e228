"""What a wheel holds, and that the kernels' sources are found where it is installed."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
FIND_SOURCES = """
from rocmega.registry import family_module
from rocmega.toolchain.unit import hip_dir, models_dir, source_key
from rocmega.models.glm.presets import preset
from rocmega.models.glm.weights import Formats
config = family_module("glm_moe_dsa", "config").from_dict(preset("glm-5.2-tiny"))
unit = family_module("glm_moe_dsa", "kernel").unit(config, Formats("f32", "f32"), "host")
assert unit.source.is_file() and source_key(unit, "host", [])
print(hip_dir(), models_dir(), unit.source)
"""


def build(folder: Path, what: str, out: Path) -> Path:
    """Builds with the backend itself: what pip does, without installing setuptools anew."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(out)], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources, links kept as links: building leaves files behind."""
    folder = tmp_path_factory.mktemp("tree") / "rocmega"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("rocmega", "hip", "models"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    return build(tree, "build_wheel", tmp_path_factory.mktemp("wheel"))


def sources(folder: Path) -> set[str]:
    kept, trained = {".py", ".h", ".hip", ".cpp", ".typed"}, "glm-5.2-puzzles"
    found = set()
    for name in ("rocmega", "hip", "models"):
        base = Path("rocmega") if name == "rocmega" else Path("rocmega") / name
        files = [path for path in (folder / name).rglob("*") if path.is_file()]
        wanted = (path for path in files if path.suffix in kept or path.parent.name == trained)
        found |= {str(base / path.relative_to(folder / name)) for path in wanted}
    return found


def test_the_wheel_holds_every_source_and_nothing_else(tree, wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == sources(tree)
    assert {"rocmega/hip/platform/amd.h", "rocmega/models/glm/decode.hip", "rocmega/models/glm/standard.py"} <= names


def test_the_wheel_carries_licence_and_command(wheel):
    archive = zipfile.ZipFile(wheel)
    [entry] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "rocmega = rocmega.cli:main" in archive.read(entry).decode()
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_a_wheel_made_from_the_source_archive_is_the_same(tree, wheel, tmp_path):
    archive = build(tree, "build_sdist", tmp_path)
    shutil.unpack_archive(archive, tmp_path, filter="data")
    again = build(tmp_path / archive.name.removesuffix(".tar.gz"), "build_wheel", tmp_path)
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_kernel_sources_are_found_in_an_installed_wheel(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{FIND_SOURCES}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(Path(path).is_relative_to(site) for path in done.stdout.split())
