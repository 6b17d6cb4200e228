"""Which kernel a command means: a model's, given by name or by its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.errors import RequestError

if TYPE_CHECKING:
    from rocmega.toolchain import Unit

FORMATS = ("f32", "bf16", "fp8", "mxfp4")


@dataclass(frozen=True)
class Described:
    """A model that a command means. stored: its formats before they are packed."""

    family: str
    config: Any
    stored: Any

    def module(self, name: str) -> Any:
        """A module of its family."""
        from rocmega import registry

        return registry.family_module(self.family, name)


def units(
    model: str, format: str | None, ranks: int, activations: str = "auto", *, one_row: bool = False
) -> Callable[[str], Unit]:
    """From a target to what is compiled for it, for weights as they are packed for it.

    model: a checkpoint directory, whose formats count, or a model that we know by name, such as "glm-5.2". format: of
    the big matrices of a named model, by default as its checkpoint is published, and f32 for the tiny ones.
    activations: as for `rocmega.LLM`. one_row: what steps of one row are run by on a GPU.
    """
    if ranks < 1:
        raise RequestError(f"--tensor-parallel-size {ranks}: there is at least one rank.")
    described = describe(model, format)

    def unit(target: str) -> Unit:
        packed = described.module("plan").packed_formats
        formats = packed(described.config, described.stored, ranks, target, activations)
        made: Unit = described.module("kernel").unit(
            described.config, formats, target, ranks, activations, one_row=one_row
        )
        return made

    return unit


def describe(model: str, format: str | None) -> Described:
    """The model; arguments as for `units`."""
    from rocmega import registry

    if format is not None and format not in FORMATS:
        raise RequestError(f"--format {format!r}: choose one of {', '.join(FORMATS)}.")
    named = registry.preset_names()
    if model in named:
        fields = registry.presets_of(model).preset(model)
    elif Path(model).is_dir():
        fields = registry.read_config(model)
    else:
        raise RequestError(f"{model!r} is neither a checkpoint directory nor one of {', '.join(named)}.")
    family = fields["model_type"]
    weights = registry.family_module(family, "weights")
    config = registry.family_module(family, "config").from_dict(fields)
    if model in named:
        stored = weights.named_formats(config, format or ("f32" if model.endswith("-tiny") else None))
    else:
        from rocmega.checkpoint import Checkpoint

        stored = weights.check(Checkpoint(model), config)
    return Described(family, config, stored)
