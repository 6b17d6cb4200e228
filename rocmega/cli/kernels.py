"""Which kernel a command means: a model's, given by name or by its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rocmega.errors import RequestError

if TYPE_CHECKING:
    from rocmega.toolchain import Unit

FORMATS = ("f32", "bf16", "fp8")


def units(model: str, format: str | None, ranks: int, activations: str = "auto") -> Callable[[str], Unit]:
    """From a target to what is compiled for it, for weights as they are packed for it.

    model: a checkpoint directory, whose formats count, or a model that we know by name, such as "glm-5.2". format: of
    the big matrices of a named model, by default that of its published FP8 checkpoint, and f32 for the tiny ones.
    activations: as for `rocmega.LLM`.
    """
    from rocmega import registry

    if ranks < 1:
        raise RequestError(f"--tensor-parallel-size {ranks}: there is at least one rank.")
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
    kernel, plan, weights = (registry.family_module(family, name) for name in ("kernel", "plan", "weights"))
    config = registry.family_module(family, "config").from_dict(fields)
    if model in named:
        linear = format or ("f32" if model.endswith("-tiny") else "fp8")
        stored = weights.Formats(linear=linear, island="f32" if linear == "f32" else "bf16")
    else:
        from rocmega.checkpoint import Checkpoint

        stored = weights.check(Checkpoint(model), config)

    def unit(target: str) -> Unit:
        formats = plan.packed_formats(config, stored, ranks, target, activations)
        return kernel.unit(config, formats, target, ranks, activations)

    return unit
