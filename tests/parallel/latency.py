"""How long the sum over ranks takes inside a kernel, beside all-reduce of the collective library in a graph.

torchrun --nproc-per-node 2 -m tests.parallel.latency

Prints, from rank 0, microseconds a hop: gather all of x, exchange shares in each of the three ways, sum. On GPUs; on
the CPU target only that it runs.
"""

from __future__ import annotations

import ctypes
import os
import time

import torch

from rocmega.drivers.base import Driver
from rocmega.drivers.select import pick
from rocmega.parallel import TorchGroup, local_rank
from rocmega.toolchain import Unit, compile
from tests.parallel.chain import EXCHANGES, SOURCE

ROWS = 8
SHAPES = [(values, rows) for values in (6144, 12288) for rows in (1, 4, 8)]


class Params(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint32) for name in ("rows", "rank", "poll_limit", "hops", "epoch")],
        *[(name, ctypes.c_uint64) for name in ("x", "error", "parts", "alarms")],
    ]


def hop(group: TorchGroup, driver: Driver, values: int, rows: int, hops: int, exchange: str, repeats: int = 5) -> float:
    """Microseconds of a hop, the best of `repeats` launches after one to warm up."""
    header = f"#pragma once\nconstexpr int ROWS = {ROWS}, RANKS = {group.size}, VALUES = {values};\n"
    unit = Unit("latency", SOURCE.with_name("latency.hip"), {"ranks_config.h": header}, {"EXCHANGE": exchange})
    function = driver.load(compile(unit, driver.arch)).function("latency")
    blocks = min(driver.facts().compute_units, driver.max_blocks(function, 256, 0))
    place = ROWS * values * 8
    own = [driver.shared("x", 2 * place), driver.shared("error", (1 + blocks) * 32)]
    shared = [
        group.symmetric(driver, name, size, 0) for name, size in (("parts", 2 * group.size * place), ("alarms", 4))
    ]
    tables = [torch.tensor(buffer.addresses, dtype=torch.int64, device=driver.device) for buffer in shared]
    seconds = []
    for launch in range(repeats + 1):
        epoch = 1 + launch * (hops + 2)
        limit = group.poll_limit(driver) or 0
        addresses = [buffer.address for buffer in own] + [driver.constant(table) for table in tables]
        params = Params(rows, group.rank, limit, hops, epoch, *addresses)
        there = torch.frombuffer(bytearray(params), dtype=torch.uint8).to(driver.device)
        group.barrier()
        begin = time.perf_counter()
        driver.launch(function, driver.constant(there), blocks, 256)
        driver.synchronize()
        seconds.append(time.perf_counter() - begin)
        assert not own[1].tensor.any(), "a wait was given up"
    for buffer in (*shared, *own):
        buffer.close()
    return 1e6 * min(seconds[1:]) / hops


def all_reduce(group: TorchGroup, values: int, rows: int, hops: int, repeats: int = 5) -> float:
    """The same sums by NCCL or RCCL, captured in a graph; likewise the best of several."""
    x = torch.ones(rows, values, device=f"cuda:{local_rank()}")
    group.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Another thread of torch's looks at the collectives that ran before, which must not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(hops):
            group.all_reduce(x)
    seconds = []
    for _ in range(repeats + 1):
        group.barrier()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 1e6 * min(seconds[1:]) / hops


def main() -> None:
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(local_rank())
    group = TorchGroup(int(os.environ["WORLD_SIZE"]))
    driver = pick("auto", index=local_rank() if gpu else None)
    for values, rows in SHAPES if gpu else [(256, 1)]:
        inside = {way: hop(group, driver, values, rows, 2000 if gpu else 4, way) for way in EXCHANGES}
        outside = f"{all_reduce(group, values, rows, 200):8.2f} us by all_reduce in a graph" if gpu else ""
        if group.rank == 0:
            ways = ", ".join(f"{way} {us:.2f}" for way, us in inside.items())
            print(f"{values} values x {rows} rows, {group.size} ranks, us a hop: {ways} {outside}", flush=True)
    group.close()


if __name__ == "__main__":
    main()
