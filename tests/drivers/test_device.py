"""The driver of the GPU that is here, for real. Skipped without one."""

from __future__ import annotations

import multiprocessing
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rocmega.drivers import pick
from rocmega.drivers.gpu import GpuDriver
from rocmega.errors import DriverError
from rocmega.toolchain import Unit, compile, search

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

# One pointer in. Every block counts itself and waits for all others, so that only resident blocks ever end.
KERNEL = """
#if defined(__CUDACC__)
#define DEVICE __device__
#define THREAD threadIdx.x
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#define ADD(p) atomicAdd(p, 1u)
#define READ(p) *(volatile unsigned*)(p)
#define SYNC __syncthreads()
#define READ_HOST(p) *(volatile unsigned*)(p)
#define WRITE_HOST(p, v) *(volatile unsigned*)(p) = v
extern __shared__ unsigned large[];
#else
#define DEVICE __attribute__((device))
#define __global__ __attribute__((global))
#define THREAD __builtin_amdgcn_workitem_id_x()
#define BLOCK __builtin_amdgcn_workgroup_id_x()
#define BLOCKS (__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x())
#define ADD(p) __hip_atomic_fetch_add(p, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)
#define READ(p) __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)
#define SYNC __builtin_amdgcn_s_barrier()
#define READ_HOST(p) __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)
#define WRITE_HOST(p, v) __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)
extern __attribute__((shared)) unsigned large[];
#endif
struct Args { const float* in; float* out; unsigned* counter; unsigned words, factor; };
extern "C" __global__ void meet(const Args* args) {
  Args a = *args;
  if (THREAD == 0) {
    if (a.words) large[a.words - 1] = a.factor;
    ADD(a.counter);
    while (READ(a.counter) < BLOCKS) {}
  }
  SYNC;
  unsigned factor = a.words ? large[a.words - 1] : a.factor;
  a.out[BLOCK * 64 + THREAD] = a.in[THREAD] * factor;
}
// Counts in word 0 whenever the host has raised word 1, as far as it says.
extern "C" __global__ void answer(const Args* args) {
  unsigned* words = args->counter;
  if (BLOCK || THREAD) return;
  for (unsigned asked = 0; asked < args->words;) {
    unsigned now = READ_HOST(words + 1);
    if (now != asked) asked = now, WRITE_HOST(words, asked * 10);
  }
}
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[GpuDriver]:
    opened = pick("auto")
    assert isinstance(opened, GpuDriver)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def meet(driver: GpuDriver, tmp_path_factory: pytest.TempPathFactory):
    if search(driver.arch).found is None:
        pytest.skip(f"no compiler for {driver.arch}")
    folder = tmp_path_factory.mktemp("meet")
    (folder / "meet.hip").write_text(KERNEL)
    return driver.load(compile(Unit("meet", folder / "meet.hip"), driver.arch)).function("meet", ["only"])


def launch(driver: GpuDriver, function, blocks: int, words: int = 0, stream=None) -> torch.Tensor:
    inputs = torch.arange(64, dtype=torch.float32, device=driver.device)
    with driver.shared("out", blocks * 64 * 4) as out, driver.shared("counter", 64) as counter:
        args = struct.pack("<QQQII", driver.constant(inputs), out.address, counter.address, words, 3)
        block = torch.frombuffer(bytearray(args), dtype=torch.uint8).to(driver.device)
        torch.cuda.synchronize()
        driver.launch(function, driver.constant(block), blocks, 64, words * 4, stream)
        driver.synchronize()
        assert counter.tensor[:4].cpu().numpy().view("uint32")[0] == blocks
        return out.tensor.cpu().view(torch.float32).view(blocks, 64)


def test_facts(driver: GpuDriver) -> None:
    facts = driver.facts()
    assert facts.compute_units == torch.cuda.get_device_properties(driver.device).multi_processor_count
    assert facts.memory_bytes > 2**33
    assert facts.lds_bytes >= 64 * 1024
    assert facts.xcds >= 1


def test_all_blocks_meet(driver: GpuDriver, meet) -> None:
    expected = torch.arange(64, dtype=torch.float32) * 3
    for blocks in (1, 7, driver.facts().compute_units, driver.max_blocks(meet, 64, 0)):
        assert torch.equal(launch(driver, meet, blocks), expected.expand(blocks, 64))


def test_on_a_stream(driver: GpuDriver, meet) -> None:
    stream = torch.cuda.Stream(driver.device)
    assert launch(driver, meet, 3, stream=stream)[2, 5] == 15


def test_large_lds(driver: GpuDriver, meet) -> None:
    words = 62 * 1024 // 4  # more than CUDA gives without being asked
    assert launch(driver, meet, driver.facts().compute_units, words)[0, 63] == 189


def test_one_block_too_many_is_refused(driver: GpuDriver, meet) -> None:
    most = driver.max_blocks(meet, 64, 0)
    with pytest.raises(DriverError, match=f"use at most {most}"):
        launch(driver, meet, most + 1)


def test_shared_memory_is_not_torchs(driver: GpuDriver) -> None:
    before = torch.cuda.memory_reserved(driver.device)
    with driver.shared("x", 1 << 24) as buffer:
        assert torch.cuda.memory_reserved(driver.device) == before
        assert buffer.tensor.device == driver.device
        assert buffer.tensor.data_ptr() == buffer.address
        assert not buffer.tensor.any()
        buffer.tensor.fill_(3)
        assert int(buffer.tensor.sum(dtype=torch.int64)) == 3 << 24


def test_host_and_kernel_answer_each_other(driver: GpuDriver, meet, tmp_path: Path) -> None:
    """What the ring and the cancel word need: both see, while the kernel runs, what the other wrote."""
    (tmp_path / "meet.hip").write_text(KERNEL)
    function = driver.load(compile(Unit("meet", tmp_path / "meet.hip"), driver.arch)).function("answer")
    with driver.mapped("words", 64) as mapped:
        words = mapped.tensor.view(torch.int32)
        args = struct.pack("<QQQII", 0, 0, mapped.address, 5, 3)
        block = torch.frombuffer(bytearray(args), dtype=torch.uint8).to(driver.device)
        running = driver.start(function, driver.constant(block), 1, 64)
        for asked in range(1, 6):
            assert asked == 5 or not running.done()
            words[1] = asked
            deadline = time.monotonic() + 10
            while int(words[0]) != asked * 10:
                assert time.monotonic() < deadline, "the kernel's answer never came"
        running.wait()
        assert running.done()


def _peer(handle: bytes, nbytes: int, said) -> None:
    other = pick("auto")
    with other.open("x", handle, nbytes) as buffer:
        said.put(buffer.tensor[:4].cpu().tolist())
        buffer.tensor[4] = 99
        torch.cuda.synchronize()
    other.close()


def test_another_process_sees_it(driver: GpuDriver) -> None:
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    for peers in (False, True):
        with driver.shared("x", 4096, peers=peers) as buffer:
            buffer.tensor[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device=driver.device)
            torch.cuda.synchronize()
            process = context.Process(target=_peer, args=(driver.export(buffer), 4096, said))
            process.start()
            process.join(120)
            assert process.exitcode == 0
            assert said.get(timeout=10) == [1, 2, 3, 4]
            assert int(buffer.tensor[4]) == 99


def test_a_kernel_that_is_not_there(driver: GpuDriver, meet, tmp_path: Path) -> None:
    (tmp_path / "meet.hip").write_text(KERNEL)
    module = driver.load(compile(Unit("meet", tmp_path / "meet.hip"), driver.arch))
    with pytest.raises(DriverError, match="has no kernel 'part'"):
        module.function("part")


def test_how_long_a_poll_takes(driver: GpuDriver) -> None:
    """Past all caches and back, and a short sleep: a tenth of a microsecond to ten of them."""
    assert 100_000 < driver.polls_per_second < 10_000_000
    print(f"{driver.polls_per_second} polls a second")
