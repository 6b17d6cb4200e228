"""Times the fused path's step at GLM-5.2's dimensions: python -m rocmega.fused.measure --help.

One rank of eight, random weights, a cache of noise, no reduction between ranks. For comparisons use `rocmega compare`;
this tells where a step's time goes: its graph's time, and each kernel's share from torch's profiler.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from rocmega.cache import PAGE, PagedCache, TorchMemory
from rocmega.models.common.random_weights import random_fields
from rocmega.models.glm.config import from_dict
from rocmega.models.glm.fused import FusedPath
from rocmega.models.glm.plan import plan
from rocmega.models.glm.presets import preset
from rocmega.models.glm.published import Formats
from rocmega.models.glm.shard import first_layers, rank_config
from rocmega.models.glm.weights import assemble
from rocmega.step import StepBatch

REPEATS = 50


def main() -> None:
    """Prints a table."""
    options = _options()
    path, batch = _prepare(options)
    inputs = path.place(batch)
    path.run(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        path.run(*inputs)
    milliseconds = _times(graph)
    layers = options.layers
    print(f"{torch.cuda.get_device_name()}, {layers} layers, {options.rows} rows, context {options.context}: "
          f"{milliseconds:.3f} ms a step in a graph, {milliseconds / layers * 1e3:.1f} us a layer")  # fmt: skip
    for name, count, microseconds in _kernels(graph):
        print(f"  {name:<14} {count:5d} launches {microseconds / count:8.2f} us each {microseconds / 1e3:8.3f} ms")


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="python -m rocmega.fused.measure")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--format", default="fp8", choices=("fp8", "bf16", "mxfp4"))
    return parser.parse_args()


def _prepare(options: Any) -> tuple[FusedPath, StepBatch]:
    ranks, rows = 8, options.rows
    config = first_layers(from_dict(preset("glm-5.2")), options.layers)
    formats = Formats("fp8" if options.format == "mxfp4" else options.format, "bf16", options.format)
    todo = plan(config, formats, tp=ranks)
    weights = assemble(todo.formats, config, random_fields(todo, options.layers, "cuda"), ranks)
    part = rank_config(config, ranks)
    pages = -(-options.context // PAGE)
    cache = PagedCache(part.cache_spec(weights.formats.cache), rows * pages, TorchMemory("cuda"))
    for pool in (*cache.latent, *cache.index):
        if pool is not None:
            pool.normal_()
    table = torch.randperm(rows * pages).view(rows, pages).to(torch.int32)
    positions = torch.full((rows,), options.context - 1, dtype=torch.int32)
    return FusedPath(part, weights, cache, max_model_len=options.context), StepBatch(positions, positions, table)


def _times(graph: torch.cuda.CUDAGraph) -> float:
    """Median milliseconds of a replay."""
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[REPEATS // 2]


def _kernels(graph: torch.cuda.CUDAGraph) -> list[tuple[str, int, float]]:
    """Of one replay, by kernel: launches and microseconds, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    found = [(event.key, event.count, event.device_time_total) for event in profiler.key_averages()]
    return sorted((each for each in found if each[2] > 0), key=lambda each: -each[2])


if __name__ == "__main__":
    main()
