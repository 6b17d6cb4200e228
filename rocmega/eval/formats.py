"""The same weights in another published format, to see what the format costs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rocmega.errors import RequestError

if TYPE_CHECKING:
    import torch

FORMATS = ("f32", "bf16", "fp8", "mxfp4")


def convert(checkpoint: Path, directory: Path, format: str) -> Path:
    """Writes a checkpoint's values in another format, its tokenizer beside them; returns the directory.

    format: of FORMATS; "fp8" and "mxfp4" quantize the matrices that published checkpoints have in it, to the nearest.
    What the checkpoint was rounded to before stays so: f32 made of FP8 weights has their values. Meant for small
    models: it is the plain way, a tensor at a time on the CPU. Raises RequestError for other formats and families.
    """
    from rocmega import registry
    from rocmega.checkpoint import Checkpoint
    from rocmega.checkpoint.layouts import read_matrix

    if format not in FORMATS:
        raise RequestError(f"Weights cannot be put into {format!r}: choose of {', '.join(FORMATS)}.")
    config = registry.read_config(checkpoint)
    presets = registry.family_module(config["model_type"], "presets")
    if not hasattr(presets, "write_weights"):
        raise RequestError(f"Weights of {config['model_type']!r} are not put into other formats yet, only of GLM.")
    files = Checkpoint(checkpoint)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return read_matrix(files, name).dequantize() if len(shape) == 2 else files.tensor(name).float()

    presets.write_weights(config, directory, format, value)
    for file in checkpoint.glob("*token*"):
        shutil.copy(file, directory / file.name)
    return directory
