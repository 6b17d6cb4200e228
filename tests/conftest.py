"""What all tests share."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# The models are tiny and pytest runs several processes: more threads would only wait for each other. Before torch is
# imported, and for child processes too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU Triton's kernels run in its interpreter, which it has to know before it is imported.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_checkpoint("glm-5.2-tiny", "fp8", dequantized=True): a checkpoint's directory, written once. Read only."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def write(name: str = "glm-5.2-tiny", dtype: str = "f32", *, dequantized: bool = False) -> Path:
        from rocmega.registry import presets_of

        label = f"{name}-{dtype}-dequantized" if dequantized else name if dtype == "f32" else f"{name}-{dtype}"
        return presets_of(name).write_checkpoint(name, folder / label, dtype, dequantized=dequantized)

    return write


@pytest.fixture(scope="session")
def tiny(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A tiny GLM-5.2 in float32, vocabulary 512. Read only."""
    return tiny_checkpoint()


@pytest.fixture
def tiny_copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    import shutil

    return Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
