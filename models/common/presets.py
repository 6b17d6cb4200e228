"""Writing small models with random weights as checkpoints are published: what every family does alike."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rocmega.checkpoint import INDEX
from rocmega.errors import RequestError

Stored = Iterable[tuple[str, torch.Tensor]]


def copy_of(presets: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """A copy of a preset's config.json. Raises RequestError for an unknown name."""
    if name not in presets:
        raise RequestError(f"there is no preset {name!r}; known presets: {', '.join(presets)}.")
    return json.loads(json.dumps(presets[name]))


def write_files(
    directory: Path, config: dict[str, Any], names: Sequence[str], shards: int, stored: Callable[[list[str]], Stored]
) -> None:
    """Writes config.json, safetensors shards and their index.

    stored: makes the tensors, scales included, that belong to some names.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    groups = _groups(list(names), shards)
    weight_map, total = {}, 0
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = dict(stored(group))
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _groups(names: list[str], shards: int) -> list[list[str]]:
    """The names, in order, in `shards` groups of about the same size."""
    size = -(-len(names) // max(1, min(shards, len(names))))
    return [names[start : start + size] for start in range(0, len(names), size)]


def draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normally distributed values: a pure function of name, shape and seed."""
    return torch.randn(shape, generator=generator(name, seed))


def generator(name: str, seed: int) -> torch.Generator:
    """The source of a tensor's random values."""
    key = f"{name}#{seed}" if seed else name  # a seed of its own: torch's generator uses the low 32 bits only
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))
