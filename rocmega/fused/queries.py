"""Queries and index queries, rotated, and the step's cache entries."""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import rotate_outputs, store_outputs
from rocmega.fused.cache_entry import own_slot, write_key, write_latent
from rocmega.fused.tiles import normed_linear


@triton.jit
def queries(
    q_normed, q_squares, rows, positions, table, max_pages, angles,
    kv, kv_gain, latent_pool, key, key_norm, key_pool, counts,
    q_tiles, q_scales, index_tiles, index_scales, nope, query, index_query,
    Q: tl.constexpr, Q_EPS: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    LATENT: tl.constexpr, INDEX_HEADS: tl.constexpr, INDEX: tl.constexpr, KEY_EPS: tl.constexpr,
    COUNTS: tl.constexpr, FORMAT: tl.constexpr, PAGE: tl.constexpr, FULL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """First a program for each row's cache entries, then one for each 16 outputs of q_b and, FULL, of index_q.

    Leaves nope [rows, HEADS, NOPE], the rotated rope channels in query [rows, HEADS, LATENT + ROPE], index_query [rows,
    INDEX_HEADS, INDEX], and clears counts [rows, COUNTS], which the selection adds to.
    """
    task = tl.program_id(0)
    HEAD: tl.constexpr = NOPE + ROPE
    Q_TILES: tl.constexpr = HEADS * HEAD // 16
    if task < rows:
        at = tl.load(positions + task)
        slot = own_slot(table, positions, task, max_pages, PAGE)
        WIDTH: tl.constexpr = LATENT + ROPE
        write_latent(kv + task * WIDTH, kv_gain, angles, at, latent_pool + slot * WIDTH, LATENT, ROPE, Q_EPS)
        if FULL:
            write_key(key + task * INDEX, key_norm, angles, at, key_pool + slot * INDEX, INDEX, ROPE, KEY_EPS)
            for first in range(0, COUNTS, 1024):
                tl.store(counts + task * COUNTS + first + tl.arange(0, 1024), tl.zeros([1024], tl.int32))
    else:
        tile = task - rows
        if tile < Q_TILES:
            N: tl.constexpr = HEADS * HEAD
            out = normed_linear(
                q_normed, q_squares, rows, q_tiles, q_scales, tile, N, Q, Q_EPS, FORMAT, ROWS, BLOCK, STAGES
            )
            head, channel = tile * 16 // HEAD, tile * 16 % HEAD
            if channel < NOPE:
                store_outputs(nope, HEADS * NOPE, head * NOPE + channel, out, rows, HEADS * NOPE, ROWS)
            else:
                out = rotate_outputs(out, channel - NOPE, angles, positions, rows, ROPE // 2, ROWS)
                STRIDE: tl.constexpr = HEADS * (LATENT + ROPE)
                first = head * (LATENT + ROPE) + LATENT + channel - NOPE
                store_outputs(query, STRIDE, first, out, rows, STRIDE, ROWS)
        else:
            tile -= Q_TILES
            M: tl.constexpr = INDEX_HEADS * INDEX
            out = normed_linear(
                q_normed, q_squares, rows, index_tiles, index_scales, tile, M, Q, Q_EPS, FORMAT, ROWS, BLOCK, STAGES
            )
            channel = tile * 16 % INDEX
            if channel < ROPE:
                out = rotate_outputs(out, channel, angles, positions, rows, ROPE // 2, ROWS)
            store_outputs(index_query, M, tile * 16, out, rows, M, ROWS)
