"""Single kernels in Triton's interpreter against the formulas."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rocmega.checkpoint.quantize import quantize_fp8, quantize_mxfp4
from rocmega.checkpoint.tiles import PackedMatrix, dtype_of, to_fnuz
from rocmega.fused import attend, index, residual, route
from rocmega.fused.launch import launch
from rocmega.models.common.formulas import route as route_formula
from rocmega.models.glm.formulas import attention, index_scores, select
from rocmega.models.glm.fused import _packed, _shape

ROUTED = {"TOPK": 3, "FACTOR": 2.5}


def packed(format: str, n: int, k: int) -> PackedMatrix:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) / k**0.5
    if format == "mxfp4":
        return _of(format, *quantize_mxfp4(values))
    if not format.startswith("fp8"):
        return PackedMatrix.of(values.to(dtype_of(format)), format)
    weight, scales = quantize_fp8(values)
    if format.startswith("fp8_32"):
        scales = scales.repeat_interleave(4, 0)[: -(-n // 32)].repeat_interleave(4, 1)[:, : -(-k // 32)]
        scales = scales * torch.linspace(0.5, 1.5, scales.numel()).view_as(scales)
    if format.endswith("fnuz"):
        weight, scales = to_fnuz(weight), 2 * scales
    return _of(format, weight, scales)


def _of(format: str, weight: torch.Tensor, scales: torch.Tensor) -> PackedMatrix:
    return PackedMatrix.of(weight, format, scales)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("format", ["f32", "bf16", "fp8", "fp8_32", "fp8_fnuz", "mxfp4"])
def test_products_of_packed_tiles(format: str, rows: int) -> None:
    """[144, 160]: two blocks of scales each way, rows and columns of padding. Exact but for the order of sums."""
    matrix = packed(format, 144, 160)
    heads = torch.randn(rows, 160, generator=torch.Generator().manual_seed(1))
    heads = heads if format == "f32" else heads.to(torch.bfloat16)
    x = torch.randn(rows, 144, generator=torch.Generator().manual_seed(2))
    gain, normed, squares = torch.linspace(0.5, 2, 144), torch.empty(rows, 144), torch.empty(rows, 9)
    wanted = x + heads.float() @ matrix.dequantize().T
    launch(
        residual.add_linear, (9,), heads, x, gain, normed, squares, rows, *_packed(matrix),
        N=144, K=160, FORMAT=format, **{**_shape(rows, matrix), "BLOCK": 4},
    )  # fmt: skip
    assert (x - wanted).abs().max() < 1e-5
    assert (normed - wanted * gain).abs().max() < 2e-5
    assert (squares.sum(1) - wanted.square().sum(1)).abs().max() < 1e-3


def test_routing_takes_the_formulas_experts_ties_included() -> None:
    random = torch.Generator().manual_seed(3)
    parts = torch.randint(-2, 3, (4, 5, 24), generator=random).float() / 4  # few different sums
    bias = torch.randint(0, 2, (24,), generator=random).float() / 8
    weights, unused = torch.empty(5, 24), torch.empty(1, dtype=torch.int32)
    launch(route.route, (5,), parts, bias, weights, unused, 5, EXPERTS=24, PARTS=4, ALONE=False, warps=1, **ROUTED)
    experts, factors = route_formula(parts.sum(0).sigmoid(), bias, ROUTED["TOPK"], ROUTED["FACTOR"])
    wanted = torch.zeros(5, 24).scatter(1, experts, factors)
    assert torch.equal(weights != 0, wanted != 0)
    assert (weights - wanted).abs().max() < 1e-6


def test_attention_in_splits() -> None:
    """Two blocks to a split, the last split and block in part; what no row has seen is NaN."""
    rows, heads, latent, rope, split, splits = 2, 3, 32, 16, 64, 3
    positions = torch.tensor([149, 40], dtype=torch.int32)
    random = torch.Generator().manual_seed(6)
    query = 2 * torch.randn(rows, heads, latent + rope, generator=random)
    pool = torch.full((rows * splits, 64, latent + rope), float("nan"))
    table = torch.randperm(rows * splits, generator=random).view(rows, splits).to(torch.int32)
    partial, stats = torch.full((rows, splits, heads, latent), float("nan")), torch.empty(rows, splits, heads, 2)
    for row, position in enumerate(positions.tolist()):
        at = torch.arange(position + 1)
        pool[table[row, at // 64].long(), at % 64] = torch.randn(position + 1, latent + rope, generator=random)
    out = torch.empty(rows, heads, latent)
    sizes = {"HEADS": heads, "LATENT": latent, "TOPK": 256, "SELECTED": False, "SPLIT": split, "SPLITS": splits}
    launch(
        attend.attend, (rows, splits), query, pool, positions, table, positions, partial, stats, 0.2, splits,
        ROPE=rope, PAGE=64, BLOCK=32, HEAD_ROWS=16, **sizes,
    )  # fmt: skip
    launch(attend.merge, (rows * heads, 2), partial, stats, positions, out, BLOCK=16, **sizes)
    for row, position in enumerate(positions.tolist()):
        entries = pool[table[row].long()].flatten(0, 1)[None, : position + 1]
        allowed = torch.ones(1, 1, position + 1, dtype=torch.bool)
        wanted = attention(query[row][None], entries, allowed, 0.2, latent)
        assert (out[row] - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("ties", [True, False])
def test_selection_takes_the_formulas_positions(ties: bool) -> None:
    """Rows shorter and longer than TOPK, over several chunks. Small whole numbers make exact scores, and many ties."""
    topk, chunk, pages, heads, width = 24, 64, 4, 16, 16
    positions = torch.tensor([200, 23, 130, 3], dtype=torch.int32)
    rows, length = len(positions), pages * 64
    random = torch.Generator().manual_seed(4)
    query, pool = (
        torch.randint(-2, 3, shape, generator=random).float() if ties else torch.randn(shape, generator=random)
        for shape in ((rows, heads, width), (rows * pages, 64, width))
    )
    parts = torch.randint(-2, 4, (2, rows, heads), generator=random).float()
    table = torch.randperm(rows * pages, generator=random).view(rows, pages).to(torch.int32)
    keys = torch.full((rows, length), -1, dtype=torch.int32)
    counts, taken = torch.zeros(rows, index.COUNTS, dtype=torch.int32), torch.full((rows, pages, 2), -9).int()
    selection = torch.full((rows, topk), -1, dtype=torch.int32)
    launch(
        index.index_scores, (rows, pages),
        query, pool, table, positions, parts, keys, counts, rows, pages, length, 0.25, 0.5,
        HEADS=heads, WIDTH=width, PARTS=2, PAGE=64,
    )  # fmt: skip
    for digit in (1, 2):
        arguments = (keys, positions, counts, length)
        launch(index.count_next, (rows, pages), *arguments, TOPK=topk, DIGIT=digit, CHUNK=chunk)
    sizes = {"TOPK": topk, "CHUNK": chunk}
    launch(index.count_taken, (rows, pages), keys, positions, counts, taken, length, pages, **sizes)
    launch(
        index.collect, (rows, pages), keys, positions, table, counts, taken, selection, length, pages, pages,
        PAGE=64, CHUNKS=pages, **sizes,
    )  # fmt: skip
    entries = pool[table.long()].flatten(1, 2)
    scores = index_scores(query[:, None], entries, parts.sum(0)[:, None] * 0.5, 0.25)
    chosen, valid = (each[:, 0] for each in select(scores, positions[:, None], topk))
    if ties:
        assert len(scores[0].unique()) < 150
    for row in range(rows):
        at = chosen[row][valid[row]]
        slots = table[row, at // 64] * 64 + at % 64
        assert torch.equal(selection[row, : len(slots)], slots.int())
        assert bool((selection[row, len(slots) :] == -1).all())
