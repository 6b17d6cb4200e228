"""What Triton makes of a step's kernels, as JSON lines: python -m tests.fused.compiled ARCH FORMAT ROWS [KERNEL ...].

A process of its own, because Triton is either a compiler or an interpreter from the moment it is imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection

import torch

from rocmega.cache import PagedCache, TorchMemory
from rocmega.fused.launch import Launch, written_down
from rocmega.models.glm.fused import FusedPath
from tests.fused.kit import rank_of_glm52

LAYERS, CONTEXT = 7, 8192  # dense and mixture layers, with an indexer and without; longer than index_topk


def main(arch: str, format: str, rows: int, names: Collection[str]) -> None:
    """Compiles the kernels of these names, or all."""
    config, weights = rank_of_glm52(LAYERS, format, "meta", arch=arch)
    cache = PagedCache(config.cache_spec(weights.formats.cache), 1, TorchMemory("meta"))
    path = FusedPath(config, weights, cache, max_model_len=CONTEXT)
    numbers = torch.empty(rows, dtype=torch.int32, device="meta")
    with written_down() as launches:
        path.run(numbers, numbers, torch.empty(rows, CONTEXT // 64, dtype=torch.int32, device="meta"))
    # One of each name and format: others differ in sizes only.
    for launch in {(each.kernel, each.constants.get("FORMAT")): each for each in launches}.values():
        if not names or launch.kernel.__name__ in names:
            print(json.dumps(describe(launch, arch)), flush=True)


def describe(launch: Launch, arch: str) -> dict[str, object]:
    compiled = launch.compile(arch)
    text = compiled.asm["amdgcn"]
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    assert scratch is not None
    return {
        "kernel": launch.kernel.__name__,
        "format": launch.constants.get("FORMAT"),
        "lds": compiled.metadata.shared,
        "scratch": int(scratch.group(1)),
        "wide_loads": len(re.findall(r"(?:global|buffer)_load(?:_lds)?_dwordx4", text)),
        "matrix_instructions": text.count("v_mfma"),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
