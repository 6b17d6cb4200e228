"""Products of packed tiles (rocmega/checkpoint/tiles.py) with the rows of a step, straight from the packed bytes.

A row of tiles, 16 outputs of a matrix [n, k], is [slots][16 outputs][16 bytes] in memory: slot s of an output holds its
inputs s * E to s * E + E - 1, as many as 16 bytes hold. So a thread's load is 16 bytes and a program's is one piece.

One row of a step multiplies and adds in registers: no shared memory, all loads of a block in flight. More rows go to
the matrix units, 16 wide. FP8 scales are applied to sums over their block, MXFP4 scales (powers of two) to the weights.
"""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import inverse_rms, wide_matmul


@triton.constexpr_function
def slot_inputs(format):
    """Inputs in a slot."""
    return {"f32": 4, "bf16": 8, "mxfp4": 32}.get(format, 16)


@triton.constexpr_function
def slot_elements(format):
    """Elements in a slot, of the dtype that tiles are read as; two inputs each for MXFP4."""
    return {"f32": 4, "bf16": 8}.get(format, 16)


@triton.constexpr_function
def slots_of(k, format):
    """Slots of an output with k inputs, padding included."""
    padding = {"f32": 16, "bf16": 32}.get(format, 128)
    return -(-k // padding) * padding // slot_inputs(format)


@triton.constexpr_function
def scale_block(format):
    """Rows and columns that share an FP8 scale; 0 for formats without."""
    return 0 if not format.startswith("fp8") else 32 if "_32" in format else 128


@triton.constexpr_function
def scales_of(k, format):
    """Scales of 16 outputs: float32 ones of FP8, bytes of MXFP4, 0 for formats without."""
    if format == "mxfp4":
        return slots_of(k, format) * 16
    return -(-k // scale_block(format)) if scale_block(format) else 0


@triton.constexpr_function
def unit_slots(format):
    """Slots that the matrix units take at once: within one scale of FP8, 128 inputs at most."""
    return (scale_block(format) or 128) // slot_inputs(format)


@triton.jit
def tiles_at(tiles, matrix, tile_row, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr):
    """Where 16 outputs of one of several matrices [N, K] begin."""
    ROWS: tl.constexpr = (N + 15) // 16
    STRIDE: tl.constexpr = slots_of(K, FORMAT) * 16 * slot_elements(FORMAT)
    return tiles + (matrix * ROWS + tile_row).to(tl.int64) * STRIDE


@triton.jit
def scales_at(scales, matrix, tile_row, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr):
    """Where the scales of the same 16 outputs begin."""
    if FORMAT == "f32" or FORMAT == "bf16":
        return scales
    elif FORMAT == "mxfp4":
        return scales + (matrix * ((N + 15) // 16) + tile_row).to(tl.int64) * scales_of(K, FORMAT)
    else:
        BLOCK: tl.constexpr = scale_block(FORMAT)
        return scales + (matrix * ((N + BLOCK - 1) // BLOCK) + tile_row * 16 // BLOCK) * scales_of(K, FORMAT)


@triton.jit
def widen(packed, FORMAT: tl.constexpr):
    """Packed elements [slots, n] as float32 [slots, n], for MXFP4 [slots, 2 * n], without scales."""
    if FORMAT == "mxfp4":
        # A code's three bits are exponent and mantissa of a half-precision number that is 2^14 times too small.
        codes = tl.join(packed & 15, packed >> 4).to(tl.uint16)
        half = ((codes & 7) << 9 | (codes & 8) << 12).to(tl.float16, bitcast=True)
        return tl.reshape(half.to(tl.float32) * 16384.0, [packed.shape[0], 2 * packed.shape[1]])
    elif FORMAT == "f32" or FORMAT == "bf16":
        return packed.to(tl.float32)
    elif FORMAT == "fp8_fnuz" or FORMAT == "fp8_32_fnuz":
        return packed.to(tl.float8e4b8, bitcast=True).to(tl.float32)
    else:
        return packed.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def scales_of_slots(scales, there, FORMAT: tl.constexpr):
    """The scales that pointers [slots] name, of formats that have some: [slots, 16 outputs] or [slots, 1]."""
    if FORMAT == "mxfp4":
        codes = tl.load(scales[:, None] + tl.arange(0, 16)[None, :], mask=there[:, None], other=0)
        return (codes.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # 2^-127 becomes 0: nothing is that small
    else:
        return tl.load(scales, mask=there, other=0.0)[:, None]


@triton.jit
def scale_of_slot(scales, slot, FORMAT: tl.constexpr):
    """Where the scales of slots are, from where those of their 16 outputs begin."""
    if FORMAT == "mxfp4":
        return scales + slot * 16
    elif FORMAT == "f32" or FORMAT == "bf16":
        return scales
    else:
        return scales + slot * slot_inputs(FORMAT) // scale_block(FORMAT)


@triton.jit
def slots_product(x, gain, tiles, k, there, K: tl.constexpr, FORMAT: tl.constexpr, GAIN: tl.constexpr):
    """What slots add to 16 outputs of one row: float32 [slots, 16].

    tiles: pointers [slots]; k: their first inputs [slots], of x [K]; there: which slots count.
    """
    E: tl.constexpr = slot_inputs(FORMAT)
    B: tl.constexpr = slot_elements(FORMAT)
    # As one run of bytes a slot: with a dimension for the 16 outputs Triton gives a warp's lanes to different slots.
    elements = tiles[:, None] + tl.arange(0, 16 * B)[None, :]
    packed = tl.load(elements, mask=there[:, None], other=0, cache_modifier=".cg")
    # Else ptxas moves each load to where it is used, and two or three of them are in flight instead of all.
    tl.debug_barrier()
    # Every output's thread loads the inputs that it multiplies: nothing passes through shared memory.
    k = k[:, None] + tl.arange(0, 16 * E)[None, :] % E
    seen = there[:, None] & (k < K)
    v = tl.load(x + k, mask=seen, other=0.0).to(tl.float32)
    if GAIN:
        v = v * tl.load(gain + k, mask=seen, other=0.0)
    return tl.sum(tl.reshape(widen(packed, FORMAT) * v, [k.shape[0], 16, E]), 2)


@triton.jit
def row_product(
    x, gain, tiles, scales, begin, end, K: tl.constexpr, FORMAT: tl.constexpr, GAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """One row x [K] times 16 outputs over slots begin to end, BLOCK of them at a time: float32 [16]."""
    acc = tl.zeros([BLOCK, 16], tl.float32)
    for first in range(begin, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        own, k = tiles + slot * (16 * slot_elements(FORMAT)), slot * slot_inputs(FORMAT)
        part = slots_product(x, gain, own, k, slot < end, K, FORMAT, GAIN)
        if FORMAT != "f32" and FORMAT != "bf16":
            part = part * scales_of_slots(scale_of_slot(scales, slot, FORMAT), slot < end, FORMAT)
        acc += part
    return tl.sum(acc, 0)


@triton.jit
def row_pair(
    x, tiles, scales, matrix, tile, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row x [K] times 16 outputs of a matrix [N, K] and of the next one, both in flight: float32 [16] each."""
    SLOTS: tl.constexpr = slots_of(K, FORMAT)
    number = tl.arange(0, 2 * BLOCK)
    own = tiles_at(tiles, matrix + number // BLOCK, tile, N, K, FORMAT)
    own_scales = scales_at(scales, matrix + number // BLOCK, tile, N, K, FORMAT)
    acc = tl.zeros([2 * BLOCK, 16], tl.float32)
    for first in range(0, SLOTS, BLOCK):
        slot = first + number % BLOCK
        k, there = slot * slot_inputs(FORMAT), slot < SLOTS
        part = slots_product(x, x, own + slot * (16 * slot_elements(FORMAT)), k, there, K, FORMAT, False)
        if FORMAT != "f32" and FORMAT != "bf16":
            part = part * scales_of_slots(scale_of_slot(own_scales, slot, FORMAT), there, FORMAT)
        acc += part
    return tl.split(tl.trans(tl.sum(tl.reshape(acc, [2, BLOCK, 16]), 1)))


@triton.jit
def unit_product(
    x, x_stride, gain, rows, tiles, scales, unit, K: tl.constexpr, FORMAT: tl.constexpr, GAIN: tl.constexpr
):
    """16 rows x [rows, K] times 16 outputs over one unit of slots: float32 [16 outputs, 16 rows]."""
    E: tl.constexpr = slot_inputs(FORMAT)
    B: tl.constexpr = slot_elements(FORMAT)
    UNIT: tl.constexpr = unit_slots(FORMAT)
    slot = unit * UNIT + tl.arange(0, UNIT)
    there = slot < slots_of(K, FORMAT)
    at = slot[:, None] * (16 * B) + tl.arange(0, 16 * B)[None, :]
    if slots_of(K, FORMAT) % UNIT == 0:
        packed = tl.load(tiles + at)
    else:
        packed = tl.load(tiles + at, mask=there[:, None], other=0)
    w = tl.reshape(widen(packed, FORMAT), [UNIT, 16, E])
    if FORMAT == "mxfp4":
        w = w * scales_of_slots(scale_of_slot(scales, slot, FORMAT), there, FORMAT)[:, :, None]
    if FORMAT != "f32":
        w = w.to(tl.bfloat16)
    w = tl.reshape(tl.permute(w, (1, 0, 2)), [16, UNIT * E])
    m = tl.arange(0, 16)[:, None]
    k = unit * (UNIT * E) + tl.arange(0, UNIT * E)[None, :]
    v = tl.load(x + m * x_stride + k, mask=(m < rows) & (k < K), other=0.0)
    if GAIN:
        v = v * tl.load(gain + k, mask=k < K, other=0.0)
    out = wide_matmul(w, tl.trans(v))
    if FORMAT != "f32" and FORMAT != "bf16" and FORMAT != "mxfp4":
        out = out * tl.load(scales + unit * (UNIT * E) // scale_block(FORMAT))
    return out


@triton.jit
def product(
    x, x_stride, gain, rows, tiles, scales, part,
    K: tl.constexpr, FORMAT: tl.constexpr, GAIN: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows x [rows, K] times 16 outputs, over one of PARTS parts of K: float32 [16 outputs, ROWS].

    tiles, scales: where those of the outputs begin (`tiles_at`, `scales_at`). GAIN: x * gain is multiplied. ROWS: 1, or
    16 for up to 16 rows. BLOCK: slots in flight for one row, a power of two. STAGES: units in flight for more.
    """
    UNITS: tl.constexpr = (slots_of(K, FORMAT) + unit_slots(FORMAT) - 1) // unit_slots(FORMAT)
    EACH: tl.constexpr = (UNITS + PARTS - 1) // PARTS
    if ROWS == 1:
        begin = part * (EACH * unit_slots(FORMAT))
        end = tl.minimum(begin + EACH * unit_slots(FORMAT), slots_of(K, FORMAT))
        return row_product(x, gain, tiles, scales, begin, end, K, FORMAT, GAIN, BLOCK)[:, None]
    else:
        acc = tl.zeros([16, 16], tl.float32)
        for unit in tl.range(part * EACH, tl.minimum(part * EACH + EACH, UNITS), num_stages=STAGES):
            acc += unit_product(x, x_stride, gain, rows, tiles, scales, unit, K, FORMAT, GAIN)
        return acc


@triton.jit
def linear(
    x, x_stride, rows, tiles, scales, matrix, tile,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows x [rows, K] times outputs 16 * tile and up of one of several matrices [N, K]: float32 [16, ROWS]."""
    own = tiles_at(tiles, matrix, tile, N, K, FORMAT)
    own_scales = scales_at(scales, matrix, tile, N, K, FORMAT)
    return product(x, x_stride, x, rows, own, own_scales, 0, K, FORMAT, False, 1, ROWS, BLOCK, STAGES)


@triton.jit
def normed_linear(
    x, squares, rows, tiles, scales, tile,
    N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`linear` of rows that were left for their norm (`store_normed`)."""
    out = linear(x, K, rows, tiles, scales, 0, tile, N, K, FORMAT, ROWS, BLOCK, STAGES)
    # Not before: its reduction over the program would keep the weights waiting.
    return out * inverse_rms(squares, rows, (K + 15) // 16, K, EPS, ROWS)[None, :]


@triton.jit
def island_part(
    x, gain, squares, rows, tiles, tile, part,
    N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, FORMAT: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Normed rows x [rows, K] in float32 times 16 outputs of a matrix [N, K], over one of PARTS parts of K."""
    own = tiles_at(tiles, 0, tile, N, K, FORMAT)
    # Half as many in flight: float32 inputs and the norm's weights want registers, and so many that one program is left
    # on an SM.
    HALF: tl.constexpr = max(1, BLOCK // 2)
    out = product(x, K, gain, rows, own, own, part, K, FORMAT, True, PARTS, ROWS, HALF, STAGES)
    return out * inverse_rms(squares, rows, (K + 15) // 16, K, EPS, ROWS)[None, :]
