"""What all tests share."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GLM-5.2 in float32, vocabulary 512. Read only."""
    from rocmega.models.glm.presets import write_checkpoint

    return write_checkpoint("glm-5.2-tiny", tmp_path_factory.mktemp("checkpoints") / "glm-5.2-tiny")


@pytest.fixture
def tiny_copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    import shutil

    return Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
