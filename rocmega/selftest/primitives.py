"""The platform layer's primitives on a device: waves, LDS, tile products and number formats, and what they should give.

`run` launches the kernels of hip/measure/primitives.hip; tests/platform asks more of them, on the CPU target.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from rocmega.errors import RocmegaError

if TYPE_CHECKING:
    from rocmega.drivers.base import Driver, Module
    from rocmega.toolchain import Unit

THREADS = 256
LARGE_LDS = 4096  # bytes of the array whose size comes with the launch on NVIDIA GPUs
CODES = torch.arange(256, dtype=torch.uint8)
PRODUCTS = {"f32": (0, torch.float32), "bf16": (1, torch.bfloat16), "fp8": (2, torch.float8_e4m3fn)}
NEAR = 2e-6  # of the largest element: matrix units round sums in their own way; f32 is three TF32 products on NVIDIA


class PrimitiveError(RocmegaError):
    """A primitive of hip/platform gives something else than it should."""


class _Args(ctypes.Structure):
    _fields_ = [*[(name, ctypes.c_uint64) for name in ("a", "b", "out", "out2")], ("n", ctypes.c_uint32)]


def unit(mma_k: int = 32) -> Unit:
    """What the toolchain compiles. mma_k 16: the host computes as gfx942 does."""
    from rocmega.toolchain import Unit
    from rocmega.toolchain.unit import hip_dir

    defines = {} if mma_k == 32 else {"MMA_K": mma_k}
    return Unit("primitives", hip_dir() / "measure" / "primitives.hip", {}, defines)


def load(driver: Driver) -> Module:
    """The kernels on a device."""
    from rocmega.toolchain import compile

    return driver.load(compile(unit(), driver.arch))


def run(
    driver: Driver,
    module: Module,
    name: str,
    a: torch.Tensor,
    b: torch.Tensor | None = None,
    *,
    words: tuple[int, int],
    n: int = 0,
    blocks: int = 1,
    out2: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches a kernel; its outputs as int32 of so many words. out2: what the second holds before."""
    a = a.to(driver.device)
    b = a if b is None else b.to(driver.device)
    with driver.shared("out", 4 * words[0]) as first, driver.shared("out2", 4 * words[1]) as second:
        if out2 is not None:
            second.tensor.copy_(out2.view(torch.uint8))
        args = _Args(driver.constant(a), driver.constant(b), first.address, second.address, n)
        args_there = torch.frombuffer(bytearray(args), dtype=torch.uint8).to(driver.device)
        lds = LARGE_LDS if driver.name == "cuda" else 0
        driver.launch(module.function(name), driver.constant(args_there), blocks, THREADS, lds)
        driver.synchronize()
        return first.tensor.view(torch.int32).cpu().clone(), second.tensor.view(torch.int32).cpu().clone()


def check(driver: Driver, module: Module) -> None:
    """All of the checks below. Raises PrimitiveError that says which primitive, where, what was expected and seen."""
    for each in (waves, lds, codes):
        each(driver, module)
    for kind in PRODUCTS:
        product(driver, module, kind)


def waves(driver: Driver, module: Module) -> None:
    """Sum, maximum, ballot, any and read of a wave."""
    width = width_of(driver)
    v = torch.randint(0, 1 << 30, (THREADS,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    v[200] = 77
    out, read = run(driver, module, "wave_ops", v, words=(5 * THREADS, THREADS))
    by_wave, terms = v.view(-1, width), ((v % 1000).float() * 0.37).view(-1, width)
    sums = torch.cat([tree_sum(wave).expand(width) for wave in terms])
    _equal("wave_sum", out[:THREADS].view(torch.float32), sums)
    key = (by_wave.long() << 20) | torch.arange(THREADS).view(-1, width)
    most = key.max(1).values.repeat_interleave(width)
    words = out[THREADS : 3 * THREADS].view(2, -1).long() & 0xFFFFFFFF
    _equal("wave_max, low word", words[0], most & 0xFFFFFFFF)
    _equal("wave_max, high word", words[1], most >> 32)
    ballot = ((by_wave & 1).long() << torch.arange(width)).sum(1).repeat_interleave(width)
    high = (torch.arange(THREADS) % 2 == 1) & (width == 64)
    half = torch.where(high, ballot >> 32, ballot) & 0xFFFFFFFF
    _equal("wave_ballot", out[3 * THREADS : 4 * THREADS].long() & 0xFFFFFFFF, half)
    _equal("wave_any", out[4 * THREADS :], (by_wave == 77).any(1).int().repeat_interleave(width))
    _equal("wave_read", read, by_wave[:, (7 * torch.arange(width) + 3) % width].reshape(-1))


def lds(driver: Driver, module: Module) -> None:
    """Atomic adds and ors, four words at once, and a block's sum and any."""
    v = torch.randint(0, 1 << 30, (THREADS,), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    out, out2 = run(driver, module, "lds_ops", v, words=(65 + 16, 2))
    _equal("lds_add", out[:64].long(), torch.bincount(v.long() % 64, minlength=64))
    bits = 0
    for x in v.tolist():
        bits |= 1 << x % 32
    _equal("lds_or", out[64:65].long() & 0xFFFFFFFF, torch.tensor([bits]))
    _equal("lds_load4", out[65:].view(torch.float32), torch.arange(64.0).view(16, 4).sum(1))
    total = torch.zeros(1)
    for wave in ((v % 1000).float() * 0.37).view(-1, width_of(driver)):
        total = total + tree_sum(wave)
    _equal("block_any", out2[:1], (v == 77).any().int()[None])
    _equal("block_sum", out2[1:].view(torch.float32), total)


def codes(driver: Driver, module: Module) -> None:
    """All codes of FP8 (OCP and FNUZ), E8M0 and E2M1, and all E2M1 codes times all E8M0 scales."""
    out, pairs = run(driver, module, "decode_all", torch.zeros(1), words=(1024, 256 * 8))
    tables = {"FP8, OCP": OCP, "FP8, FNUZ": FNUZ, "E8M0": E8M0, "E2M1": E2M1[CODES.int() & 15]}
    for (name, table), decoded in zip(tables.items(), out.view(4, 256).view(torch.float32), strict=True):
        _equal(f"decoding {name}", decoded, table.float())
    # 0 times a scale that is NaN is NaN.
    scaled = (E2M1 * E8M0[:, None]).float()
    _equal("E2M1 times E8M0 as bf16", pairs.view(torch.bfloat16).float(), scaled.flatten())


def product(driver: Driver, module: Module, kind: str) -> None:
    """A tile product A B^T + B A^T of the matrix units, against double precision."""
    n, dtype = PRODUCTS[kind]
    if kind == "fp8" and driver.arch == "gfx942":
        dtype = torch.float8_e4m3fnuz
    a, b = numbers(dtype, 1), numbers(dtype, 2)
    out, _ = run(driver, module, "tiles", pack(a), pack(b), words=(256, 1), n=n)
    got, (x, y) = out.view(16, 16).view(torch.float32).double(), (a.double(), b.double())
    want = x @ y.T + y @ x.T
    off = (got - want).abs()
    if not float(off.max()) < NEAR * float(want.abs().max()):
        row, column = divmod(int(off.nan_to_num(float("inf")).argmax()), 16)
        raise PrimitiveError(
            f"matrix units, {kind}: {int((off > NEAR * want.abs().max()).sum())} of 256 elements of a tile product are "
            f"off, most that of row {row}, column {column}: expected {float(want[row, column]):.6g}, saw "
            f"{float(got[row, column]):.6g}."
        )


def _equal(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal in every bit, but for the kind of NaN."""
    wrong = ((got != want) & ~(got.isnan() & want.isnan())) | (got.signbit() != want.signbit()) & ~got.isnan()
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise PrimitiveError(
            f"{what}: {int(wrong.sum())} of {len(wrong)} values are wrong, the first number {at}: expected "
            f"{want[at].item()!r}, saw {got[at].item()!r}."
        )


def width_of(driver: Driver) -> int:
    """Lanes of a wave."""
    return 32 if driver.name == "cuda" else 64


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of a wave as halves are added to halves."""
    while values.numel() > 1:
        half = values.numel() // 2
        values = values[:half] + values[half:]
    return values


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """[16, 64 bytes] -> 64 slots of 16 bytes, slot = chunk * 16 + row."""
    return matrix.contiguous().view(torch.uint8).view(16, 4, 16).permute(1, 0, 2).contiguous()


def numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random [16, columns of 64 bytes]."""
    columns = 64 // dtype.itemsize
    return (torch.randn(16, columns, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def e4m3(bias: int) -> torch.Tensor:
    """The numbers of all bytes, float64: sign, 4 bits of exponent, 3 of mantissa. bias 7: OCP; 8: FNUZ."""
    exponent, mantissa = CODES.double() // 8 % 16, CODES.double() % 8
    size = torch.where(
        exponent == 0, mantissa / 8 * 2.0 ** (1 - bias), (1 + mantissa / 8) * torch.exp2(exponent - bias)
    )
    nan = CODES == 0x80 if bias == 8 else CODES & 0x7F == 0x7F
    return torch.where(CODES < 128, size, -size).masked_fill(nan, float("nan"))


OCP, FNUZ = e4m3(7), e4m3(8)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
E8M0 = torch.exp2(CODES.double() - 127).masked_fill(CODES == 255, float("nan"))
