from collections.abc import Callable
from pathlib import Path

import pytest

from rocmega.toolchain import Artifact, Unit, compile, search

Build = Callable[[str, str], Artifact]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles a source text for a target; the same text is compiled once."""
    folder = tmp_path_factory.mktemp("units")

    def make(text: str, target: str) -> Artifact:
        if search(target).found is None:
            pytest.skip(f"no compiler for {target}")
        place = folder / f"{abs(hash(text)):x}"
        place.mkdir(exist_ok=True)
        source = Path(place / "unit.hip")
        source.write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ROCMEGA_CACHE", str(folder / "cache"))
            return compile(Unit("unit", source), target)

    return make
