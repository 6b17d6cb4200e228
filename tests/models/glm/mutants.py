"""Kernels with one deliberate bug each: a piece of their source replaced before they are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rocmega.models.glm import kernel
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.weights import Formats
from rocmega.toolchain import Artifact, Unit, compile

INCLUDE_ROOTS = (kernel.FOLDER.parent.parent / "hip", kernel.FOLDER.parent)
# A mutant runs for a few seconds: compiling it should not take longer. Other compilers than GCC pay no attention.
FAST = "#pragma GCC optimize 1\n"


@dataclass(frozen=True)
class Mutant:
    """`old`, which must occur exactly once in `file` (as it is included), becomes `new`."""

    bug: str
    file: str
    old: str
    new: str

    def source(self) -> str:
        """The changed file; fails if there is nothing, or not one thing, to change: no mutant is ever the original."""
        (path,) = (root / self.file for root in INCLUDE_ROOTS if (root / self.file).is_file())
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.bug}: {text.count(self.old)} times in {self.file}: {self.old}"
        return text.replace(self.old, self.new)


def build(mutant: Mutant | None, config: GlmConfig, formats: Formats, folder: Path) -> Artifact:
    """Compiles a mutant, or the kernel as it is, for the host. folder: for changed sources."""
    unit = kernel.unit(config, formats, "host")
    headers = {**unit.headers, "model_config.h": FAST + unit.headers["model_config.h"]}
    source = unit.source
    if mutant is not None and mutant.file.endswith(".hip"):
        source = folder / Path(mutant.file).name
        source.write_text(mutant.source())
    elif mutant is not None:
        headers[mutant.file] = mutant.source()
    return compile(Unit("mutant", source, headers), "host")
