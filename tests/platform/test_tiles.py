"""Tile products: on the host every bit as the instructions of gfx950 and gfx942 are taken to compute it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocmega.drivers import Driver
from rocmega.selftest.primitives import PRODUCTS, numbers, pack, product
from tests.platform.kit import module_of, run


def instruction_order(columns: int, at_once: int) -> list[np.ndarray]:
    """The columns that each instruction takes, in order: `at_once` of each of four chunks."""
    chunks = np.arange(columns).reshape(4, columns // 4)
    return [chunks[:, i : i + at_once].reshape(-1) for i in range(0, columns // 4, at_once)]


def accumulate(acc: np.ndarray, a: np.ndarray, b: np.ndarray, at_once: int) -> np.ndarray:
    """Sums in double, rounded once per instruction."""
    for columns in instruction_order(a.shape[1], at_once):
        total = acc.astype(np.float64)
        for k in columns:
            total = total + np.outer(a[:, k], b[:, k])
        acc = total.astype(np.float32)
    return acc


def double(m: torch.Tensor) -> np.ndarray:
    return m.float().numpy().astype(np.float64)


@pytest.mark.parametrize("mma_k", [32, 16])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_products(kind: str, mma_k: int) -> None:
    n, dtype = PRODUCTS[kind]
    if kind == "fp8" and mma_k == 16:
        dtype = torch.float8_e4m3fnuz
    a, b = numbers(dtype, 1), numbers(dtype, 2)
    out, _ = run("tiles", pack(a), pack(b), words=(256, 1), n=n, mma_k=mma_k)
    at_once = {"f32": 1, "bf16": 8 if mma_k == 32 else 4, "fp8": 8}[kind]
    want = accumulate(np.zeros((16, 16), np.float32), double(a), double(b), at_once)
    want = accumulate(want, double(b), double(a), at_once)
    assert np.array_equal(out.view(16, 16).view(torch.float32).numpy(), want)
    exact = double(a) @ double(b).T + double(b) @ double(a).T
    assert np.abs(want - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_are_near(device: Driver, kind: str) -> None:
    product(device, module_of(device), kind)


@pytest.mark.parametrize("rows", [1, 3, 5, 9, 16])
def test_empty_columns_stay_zero(rows: int) -> None:
    a, b = numbers(torch.bfloat16, 3), numbers(torch.bfloat16, 4)
    b[rows:] = 0
    b[:, 5] = 0
    zero = torch.zeros_like(a)
    out, _ = run("tiles", pack(zero), pack(b), words=(256, 1), n=1)
    assert not out.any()
    out, _ = run("tiles", pack(a), pack(b), words=(256, 1), n=1)
    want = double(a) @ double(b).T + double(b) @ double(a).T
    assert np.allclose(out.view(16, 16).view(torch.float32).numpy(), want, rtol=1e-5, atol=1e-5)


def test_infinities_are_not_lost() -> None:
    a, b = numbers(torch.bfloat16, 3), torch.zeros(16, 32, dtype=torch.bfloat16)
    a[2, 3] = float("inf")
    out, _ = run("tiles", pack(a), pack(b), words=(256, 1), n=1)
    assert out.view(16, 16).view(torch.float32)[2].isnan().all()


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_widened_products(device: Driver, kind: str) -> None:
    """A tile of a narrow format against activations of twice the width, which lie in the order of their columns."""
    narrow, wide = (torch.float8_e4m3fn, torch.bfloat16) if kind == "fp8" else (torch.bfloat16, torch.float32)
    a = numbers(narrow, 5)
    columns = a.shape[1]
    b = torch.randn(16, columns, generator=torch.Generator().manual_seed(6)).to(wide)
    # Tile p takes the 16-byte units 2c + p of a row.
    units = b.view(torch.uint8).view(16, 4, 2, 16).permute(2, 1, 0, 3).contiguous()
    out, _ = run("tiles", pack(a), units, words=(256, 1), n=3 if kind == "fp8" else 4, driver=device)
    want = double(a) @ double(b).T
    assert np.allclose(out.view(16, 16).view(torch.float32).numpy(), want, rtol=1e-5, atol=1e-5)
