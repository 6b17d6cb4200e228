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
    from rocmega.models.glm.presets import PRESETS, preset
    from rocmega.models.glm.weights import Formats, check

    if ranks < 1:
        raise RequestError(f"--tensor-parallel-size {ranks}: there is at least one rank.")
    if format is not None and format not in FORMATS:
        raise RequestError(f"--format {format!r}: choose one of {', '.join(FORMATS)}.")
    if model in PRESETS:
        fields = preset(model)
        config = registry.family_module(fields["model_type"], "config").from_dict(fields)
        linear = format or ("f32" if model.endswith("-tiny") else "fp8")
        stored = Formats(linear=linear, island="f32" if linear == "f32" else "bf16")
    elif Path(model).is_dir():
        from rocmega.checkpoint import Checkpoint

        fields, config = registry.read_config(model), registry.load_config(model)
        stored = check(Checkpoint(model), config)
    else:
        raise RequestError(f"{model!r} is neither a checkpoint directory nor one of {', '.join(PRESETS)}.")
    kernel, plan = (registry.family_module(fields["model_type"], name) for name in ("kernel", "plan"))

    def unit(target: str) -> Unit:
        formats = plan.packed_formats(config, stored, ranks, target, activations)
        return kernel.unit(config, formats, target, ranks, activations)

    return unit
