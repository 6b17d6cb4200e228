"""Every published layout, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rocmega.checkpoint import SINGLE, Checkpoint
from rocmega.checkpoint.layouts import StoredMatrix, divides, examine, has_fp8_nan, read_matrix
from rocmega.checkpoint.quantize import quantize_fp8, quantize_mxfp4
from rocmega.checkpoint.tiles import FORMATS, PackedMatrix, dequantize_fp8, dequantize_mxfp4, e8m0_values
from rocmega.errors import CheckpointError

E8M0 = torch.float8_e8m0fnu
N, K = 300, 416  # neither is a multiple of 128; K is one of 32


def weight(n: int = N, k: int = K) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)


def layouts() -> dict[str, tuple[str, dict[str, torch.Tensor], torch.Tensor]]:
    """Name -> (layout, tensors, values): one for each line of the table in layouts.py."""
    w = weight()
    out = {"f32": ("f32", {"m.weight": w}, w), "bf16": ("bf16", {"m.weight": w.bfloat16()}, w.bfloat16().float())}
    q, s = quantize_fp8(w)
    out["glm"] = ("fp8", {"m.weight": q, "m.weight_scale_inv": s}, dequantize_fp8(q, s))
    for name, block, layout in (("v4", 128, "fp8"), ("v4.1", 32, "fp8_32")):
        q, s = quantize_fp8(w, block, e8m0=True)
        values = dequantize_fp8(q, e8m0_values(s), block)
        out[name] = (layout, {"m.weight": q, "m.scale": s.view(E8M0)}, values)
    # One scale for each 32 of a row: each row as a matrix of its own, in blocks of 32.
    rows = [quantize_fp8(row[None], 32, e8m0=True) for row in w]
    q, s = (torch.cat([part[at] for part in rows]) for at in (0, 1))
    values = torch.cat([dequantize_fp8(q, e8m0_values(s), 32) for q, s in rows])
    out["engram"] = ("mxfp8", {"m.weight": q, "m.scale": s.view(E8M0)}, values)
    p, s = quantize_mxfp4(w)
    out["v4 experts"] = ("mxfp4", {"m.weight": p.view(torch.int8), "m.scale": s.view(E8M0)}, dequantize_mxfp4(p, s))
    out["quark"] = ("mxfp4", {"m.weight": p, "m.weight_scale": s}, dequantize_mxfp4(p, s))
    return out


LAYOUTS = tuple(layouts())


@pytest.fixture
def stored(tmp_path: Path):
    """stored(tensors): a checkpoint that holds them."""

    def write(tensors: dict[str, torch.Tensor]) -> Checkpoint:
        save_file(tensors, tmp_path / SINGLE)
        return Checkpoint(tmp_path)

    return write


@pytest.mark.parametrize("name", LAYOUTS)
def test_read_and_packed_and_unpacked(name, stored):
    layout, tensors, values = layouts()[name]
    checkpoint = stored(tensors)
    info = examine(checkpoint, "m.weight")
    assert (info.layout, info.n, info.k) == (layout, N, K)
    matrix = read_matrix(checkpoint, "m.weight")
    assert (matrix.layout, matrix.n, matrix.k) == (layout, N, K)
    assert torch.equal(matrix.dequantize(), values)
    if layout != "mxfp8":
        assert torch.equal(PackedMatrix.of(matrix.values, layout, matrix.scales).dequantize(), values)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_and_columns(name, stored):
    layout, tensors, values = layouts()[name]
    checkpoint = stored(tensors)
    whole = read_matrix(checkpoint, "m.weight")
    for start, stop in ((0, 128), (128, 256), (256, N), (0, N), (130, 150)):
        assert torch.equal(whole.rows(start, stop).dequantize(), values[start:stop])
        assert torch.equal(read_matrix(checkpoint, "m.weight", (start, stop)).dequantize(), values[start:stop])
    for start, stop in ((0, 128), (128, 384), (384, K), (0, K), (0, 32), (32, 64)):
        part = whole.columns(start, stop)
        assert torch.equal(part.dequantize(), values[:, start:stop])
        if layout != "mxfp8":
            packed = PackedMatrix.of(part.values, layout, part.scales)
            assert torch.equal(packed.dequantize(), values[:, start:stop])


@pytest.mark.parametrize("name", ["glm", "v4", "v4.1"])
@pytest.mark.parametrize("format", ["fp8_32", "fp8_fnuz", "fp8_32_fnuz", "f32", "bf16"])
def test_other_formats_have_the_same_values(name, format, stored):
    layout, tensors, values = layouts()[name]
    checkpoint = stored(tensors)
    if FORMATS[format].block > FORMATS[layout].block:
        with pytest.raises(ValueError, match="finer scales"):
            read_matrix(checkpoint, "m.weight", format=format)
        return
    for rows in (None, (0, 64), (160, 256)) if FORMATS[format].block == 32 else (None, (128, 256)):
        expected = values if rows is None else values[slice(*rows)]
        matrix = read_matrix(checkpoint, "m.weight", rows, format)
        assert matrix.layout == format
        found = PackedMatrix.of(matrix.values, format, matrix.scales).dequantize()
        assert torch.equal(found, expected.bfloat16().float() if format == "bf16" else expected)


def test_what_would_need_quantization_is_refused():
    plain = StoredMatrix("f32", weight())
    for format in ("fp8", "mxfp4"):
        with pytest.raises(ValueError, match="stored as f32 cannot become"):
            plain.to(format)


def test_parts_that_no_grid_of_scales_fits():
    q, s = quantize_fp8(weight(384, 384))
    matrix = StoredMatrix("fp8", q, s)
    for start, stop in ((64, 192), (100, 300)):
        with pytest.raises(ValueError, match="begins inside a block of 128 and ends outside"):
            matrix.rows(start, stop)
        with pytest.raises(ValueError, match="begins inside a block"):
            matrix.columns(start, stop)


@pytest.mark.parametrize(
    ("size", "parts", "block", "fits"),
    [
        (2048, 8, 128, True),  # GLM-5.2's experts over 8 ranks: 256 each
        (128, 4, 128, True),  # several parts in one block share its scale
        (320, 2, 128, False),  # 160 to 320 begins inside a block
        (320, 2, 32, True),
        (320, 4, 32, False),
        (2304, 8, 32, True),  # V4.1's experts over 8 ranks: 288 each
        (576, 1, 128, True),  # a partial last block is no border
    ],
)
def test_divides(size, parts, block, fits):
    assert divides(size, parts, block) == fits


def test_every_nan_byte_is_found():
    for place in (0, 7, 8, 100_000, 262_143, 262_150):
        for byte in (0x7F, 0xFF):
            bits = torch.full((262_151,), 0x7E, dtype=torch.uint8)
            bits[place] = byte
            assert has_fp8_nan(bits.view(torch.float8_e4m3fn))
    no_nan = torch.arange(256, dtype=torch.uint8)
    assert not has_fp8_nan(no_nan[no_nan & 0x7F != 0x7F].view(torch.float8_e4m3fn))


def with_byte(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(torch.uint8).view(-1)[77] = byte
    return tensor


def faults() -> list[tuple[str, dict[str, torch.Tensor | None], str]]:
    all_of = {name: tensors for name, (_, tensors, _) in layouts().items()}
    glm, experts, quark = (all_of[name] for name in ("glm", "v4 experts", "quark"))
    scale = "m.weight_scale_inv"
    return [
        ("glm", {"m.weight": with_byte(glm["m.weight"], 0xFF)}, "m.weight holds a NaN, FP8 byte 0x7f or 0xff"),
        ("glm", {scale: None}, rf"tensor {scale}, the scales of an FP8 weight in model.safetensors, is missing"),
        ("glm", {scale: torch.ones(3, 3)}, rf"{scale} .* \[3, 3\], not torch.float32 \[3, 4\] .* or \[10, 13\]"),
        ("glm", {scale: torch.ones(3, 4).half()}, rf"{scale} in .* is torch.float16 \[3, 4\], not"),
        ("glm", {scale: torch.ones(300, 1)}, rf"{scale} .* \[300, 1\], not"),  # a scale per row is another layout
        ("glm", {scale: -glm[scale]}, f"{scale} holds a scale that is negative, infinite or no number"),
        ("glm", {scale: glm[scale] * torch.inf}, f"{scale} holds a scale that is negative, infinite"),
        ("v4", {"m.scale": torch.full((3, 4), 255, dtype=torch.uint8).view(E8M0)}, "m.scale holds a scale that is neg"),
        ("v4 experts", {"m.scale": with_byte(experts["m.scale"], 255)}, "m.scale holds a NaN, E8M0 byte 255"),
        (
            "quark",
            {"m.weight_scale": quark["m.weight_scale"][:, :12].contiguous()},
            r"m.weight_scale .* not E8M0 \[300, 13\]",
        ),
        ("quark", {"m.weight_scale": None}, "m.weight_scale, the scales of an MXFP4 weight in .*, is missing"),
        ("quark", {"m.weight": quark["m.weight"][:, :200].contiguous()}, "no whole number of MX groups a row"),
        ("quark", {"m.scale": quark["m.weight_scale"]}, "is there as m.weight_scale and m.scale"),
        ("f32", {"m.weight": torch.ones(4)}, r"m.weight in model.safetensors is \[4\], not a matrix"),
        ("f32", {"m.weight": torch.ones(4, 4).half()}, "is torch.float16, which is not supported"),
    ]


@pytest.mark.parametrize(("name", "changes", "message"), faults())
def test_faults_name_the_tensor(name, changes, message, stored):
    tensors = {**layouts()[name][1], **changes}
    checkpoint = stored({key: tensor for key, tensor in tensors.items() if tensor is not None})
    with pytest.raises(CheckpointError, match=message):
        read_matrix(checkpoint, "m.weight")


def test_read_leaves_nothing_mapped(tmp_path):
    save_file({"m.weight": weight()}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    values = checkpoint.read("m.weight")
    rows = checkpoint.read("m.weight", (10, 20))
    (tmp_path / SINGLE).write_bytes(b"\xff" * (tmp_path / SINGLE).stat().st_size)
    assert torch.equal(values, weight())
    assert torch.equal(rows, weight()[10:20])
    checkpoint.close()


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    save_file({"m.weight": weight()}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.info("m.weight")
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"truncated: tensor m.weight ends before its time"):
        checkpoint.read("m.weight")
