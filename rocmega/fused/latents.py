"""All that is computed from a layer's normalized input: query and key-value latents, index key and head weights."""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import store_normed, store_outputs
from rocmega.fused.tiles import island_part, normed_linear


@triton.jit
def latents(
    x, gain, normed, squares, rows,
    q_tiles, q_scales, kv_tiles, kv_scales, key_tiles, key_scales, weight_tiles,
    q_gain, q_normed, q_squares, kv, key, weights,
    HIDDEN: tl.constexpr, EPS: tl.constexpr, Q: tl.constexpr, KV: tl.constexpr, KEY: tl.constexpr,
    INDEX_HEADS: tl.constexpr, FORMAT: tl.constexpr, ISLAND: tl.constexpr, PARTS: tl.constexpr, FULL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for 16 outputs, in this order: q_a, kv_a, and FULL, index_k and PARTS parts of each of the
    head weights' (x * gain in float32; weights float32 [PARTS, rows, INDEX_HEADS]). q_a is left for its norm.
    """
    tile = tl.program_id(0)
    Q_TILES: tl.constexpr = (Q + 15) // 16
    KV_TILES: tl.constexpr = (KV + 15) // 16
    KEY_TILES: tl.constexpr = (KEY + 15) // 16
    if tile < Q_TILES:
        out = normed_linear(normed, squares, rows, q_tiles, q_scales, tile, Q, HIDDEN, EPS, FORMAT, ROWS, BLOCK, STAGES)
        store_normed(q_normed, q_squares, q_gain, tile, out, rows, Q, ROWS)
    elif tile < Q_TILES + KV_TILES:
        tile -= Q_TILES
        out = normed_linear(
            normed, squares, rows, kv_tiles, kv_scales, tile, KV, HIDDEN, EPS, FORMAT, ROWS, BLOCK, STAGES
        )
        store_outputs(kv, KV, tile * 16, out, rows, KV, ROWS)
    elif FULL:
        tile -= Q_TILES + KV_TILES
        if tile < KEY_TILES:
            out = normed_linear(
                normed, squares, rows, key_tiles, key_scales, tile, KEY, HIDDEN, EPS, FORMAT, ROWS, BLOCK, STAGES
            )
            store_outputs(key, KEY, tile * 16, out, rows, KEY, ROWS)
        else:
            tile, part = (tile - KEY_TILES) // PARTS, (tile - KEY_TILES) % PARTS
            out = island_part(
                x, gain, squares, rows, weight_tiles, tile, part,
                INDEX_HEADS, HIDDEN, EPS, ISLAND, PARTS, ROWS, BLOCK, STAGES,
            )  # fmt: skip
            store_outputs(weights + part * rows * INDEX_HEADS, INDEX_HEADS, tile * 16, out, rows, INDEX_HEADS, ROWS)
