"""Attention within each of N packed sequences; lengths are read on the device.

The grid is an upper bound that follows from (N, T) alone, so one captured graph is right for any lengths. Query tiles
are numbered with gaps: sequence i owns tiles from cu_seqlens[i] // BLOCK_M + i on, at least as many as it has; a
program finds its sequence by counting the ends before its own number. Tiles behind the last sequence write zeros, so
that padding rows are finite. With many sequences nearly half of the programs may find nothing to do and end at once:
some lengths of N sequences and T tokens do need them all. Online softmax in base 2 (FlashAttention-2), float32
accumulators, inputs stay 16 bit.

With `rope` the raw q and k heads are normalised and turned while they are read: a kernel and a pass over q, k less;
worth it for short sequences, where each k is read by few query tiles.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import pdl

_LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    """A launch: query and key rows of a tile, warps, depth of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Rope(NamedTuple):
    """q/k norm and rotation to be done in flight: weights [head_dim], positions are those within the sequence."""

    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor  # float32 [positions, head_dim / 2]
    sin: Tensor
    eps: float


def default_tiles(head_dim: int, num_tokens: int, num_seqs: int, causal: bool) -> Tiles:
    """Measured on an H200 (bench/results/2026-11-30_h200_attention.md).

    Follows from what is known when a graph is captured: the step's shape, never single lengths. Causal or not made no
    difference among the tiles measured.
    """
    mean_length = num_tokens / max(1, num_seqs)
    if mean_length <= 48 or (head_dim == 32 and num_seqs > 1 and mean_length <= 192):
        return Tiles(64, 32, 4, 3)  # one block of keys holds the sequence, or wastes little
    if head_dim == 64 and mean_length > 1024:
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 64, 4, 3)


@triton.jit
def _find(cu_seqlens_ptr, tile, num_seqs, num_tokens, BLOCK_M: tl.constexpr):
    """(sequence, its start, its end, first row of the tile in it); sequence num_seqs is what lies behind the last."""
    found = tile * 0
    for begin in range(0, num_seqs, 128):
        seq = begin + tl.arange(0, 128)
        ends = tl.load(cu_seqlens_ptr + 1 + seq, mask=seq < num_seqs, other=0)
        found += tl.sum(((seq < num_seqs) & (ends // BLOCK_M + seq + 1 <= tile)).to(tl.int32), axis=0)
    start = tl.load(cu_seqlens_ptr + found)
    end = tl.load(cu_seqlens_ptr + found + 1, mask=found < num_seqs, other=0)
    end = tl.where(found < num_seqs, end, num_tokens)
    return found, start, end, (tile - start // BLOCK_M - found) * BLOCK_M


@triton.jit
def _softmax_block(
    scores, acc, row_max, row_sum, v, key, row, length, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One block of keys into the running softmax. `scale` includes log2(e)."""
    if MASK:
        seen = key[None, :] < length
        if CAUSAL:
            seen = seen & (key[None, :] <= row[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")  # of float32: no TF32
    return acc, new_max, row_sum


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])  # one compilation for every step
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_ptr, num_seqs, num_tokens, q_stride, k_stride, v_stride, scale,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # causal: the longest rows of a sequence first
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    found, start, end, first = _find(cu_seqlens_ptr, tile, num_seqs, num_tokens, BLOCK_M)
    length = end - start
    if first < length:
        row = first + tl.arange(0, BLOCK_M)
        lane = tl.arange(0, HEAD_DIM)
        inside = (row < length)[:, None]
        out_at = (
            out_ptr + (start + row).to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + lane[None, :]
        )
        if found == num_seqs:
            tl.store(out_at, tl.zeros((BLOCK_M, HEAD_DIM), out_ptr.dtype.element_ty), mask=inside)
        else:
            q_at = q_ptr + (start + row).to(tl.int64)[:, None] * q_stride + head * HEAD_DIM + lane[None, :]
            q = tl.load(q_at, mask=inside, other=0.0)
            kv_head = head // GROUP
            key = tl.arange(0, BLOCK_N)
            # 64-bit scalars walk along the sequence; offsets within it fit 32 bits and stay the same
            k_base = k_ptr + start.to(tl.int64) * k_stride + kv_head * HEAD_DIM
            v_base = v_ptr + start.to(tl.int64) * v_stride + kv_head * HEAD_DIM
            k_at = key[None, :] * k_stride + lane[:, None]  # [HEAD_DIM, BLOCK_N]
            v_at = key[:, None] * v_stride + lane[None, :]
            acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
            row_max = tl.full((BLOCK_M,), -1e30, tl.float32)
            row_sum = tl.zeros((BLOCK_M,), tl.float32)
            last = length
            whole = length // BLOCK_N * BLOCK_N  # keys in blocks that every row sees whole
            if CAUSAL:
                last = tl.minimum(first + BLOCK_M, length)
                whole = tl.minimum(first, length) // BLOCK_N * BLOCK_N
            for begin in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
                k = tl.load(k_base + begin * k_stride + k_at)
                v = tl.load(v_base + begin * v_stride + v_at)
                scores = tl.dot(q, k)
                acc, row_max, row_sum = _softmax_block(
                    scores, acc, row_max, row_sum, v, begin + key, row, length, scale, False, CAUSAL
                )
            for begin in tl.range(whole, last, BLOCK_N, num_stages=1):
                present = begin + key < length
                k = tl.load(k_base + begin * k_stride + k_at, mask=present[None, :], other=0.0)
                v = tl.load(v_base + begin * v_stride + v_at, mask=present[:, None], other=0.0)
                scores = tl.dot(q, k)
                acc, row_max, row_sum = _softmax_block(
                    scores, acc, row_max, row_sum, v, begin + key, row, length, scale, True, CAUSAL
                )
            tl.store(out_at, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _turned(at, present, position, weight_ptr, cos_ptr, sin_ptr, eps, HALF: tl.constexpr, ELEMENT: tl.constexpr):
    """Both halves of normalised and rotated heads: at [R, HALF] points to the first half. Each [R, HALF]."""
    lane = tl.arange(0, HALF)
    mask = present[:, None]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
    first = first * scale * tl.load(weight_ptr + lane).to(tl.float32)[None, :]
    second = second * scale * tl.load(weight_ptr + HALF + lane).to(tl.float32)[None, :]
    angle = position[:, None] * HALF + lane[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    return (first * cos - second * sin).to(ELEMENT), (second * cos + first * sin).to(ELEMENT)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])  # one compilation for every step
def _attend_rope_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    num_seqs, num_tokens, q_stride, k_stride, v_stride, scale, eps,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    found, start, end, first = _find(cu_seqlens_ptr, tile, num_seqs, num_tokens, BLOCK_M)
    length = end - start
    if first < length:
        row = first + tl.arange(0, BLOCK_M)
        lane = tl.arange(0, HEAD_DIM)
        half = tl.arange(0, HALF)
        inside = row < length
        out_at = (
            out_ptr + (start + row).to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + lane[None, :]
        )
        if found == num_seqs:
            tl.store(out_at, tl.zeros((BLOCK_M, HEAD_DIM), out_ptr.dtype.element_ty), mask=inside[:, None])
        else:
            ELEMENT: tl.constexpr = q_ptr.dtype.element_ty
            q_at = q_ptr + (start + row).to(tl.int64)[:, None] * q_stride + head * HEAD_DIM + half[None, :]
            q_first, q_second = _turned(q_at, inside, row, q_weight_ptr, cos_ptr, sin_ptr, eps, HALF, ELEMENT)
            kv_head = head // GROUP
            key = tl.arange(0, BLOCK_N)
            k_base = k_ptr + start.to(tl.int64) * k_stride + kv_head * HEAD_DIM
            v_base = v_ptr + start.to(tl.int64) * v_stride + kv_head * HEAD_DIM
            k_at = key[:, None] * k_stride + half[None, :]
            v_at = key[:, None] * v_stride + lane[None, :]
            acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
            row_max = tl.full((BLOCK_M,), -1e30, tl.float32)
            row_sum = tl.zeros((BLOCK_M,), tl.float32)
            last = length
            if CAUSAL:
                last = tl.minimum(first + BLOCK_M, length)
            for begin in tl.range(0, last, BLOCK_N, num_stages=STAGES):
                present = begin + key < length
                v = tl.load(v_base + begin * v_stride + v_at, mask=present[:, None], other=0.0)
                k_first, k_second = _turned(
                    k_base + begin * k_stride + k_at, present, begin + key,
                    k_weight_ptr, cos_ptr, sin_ptr, eps, HALF, ELEMENT,
                )  # fmt: skip
                scores = tl.dot(q_first, tl.trans(k_first))
                scores = tl.dot(q_second, tl.trans(k_second), scores)
                acc, row_max, row_sum = _softmax_block(
                    scores, acc, row_max, row_sum, v, begin + key, row, length, scale, True, CAUSAL
                )
            tl.store(out_at, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    causal: bool,
    rope: Rope | None = None,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], cu_seqlens int32 [N+1] -> like q, contiguous.

    float16 or bfloat16; head_dim a power of two from 16 on; tokens may be any distance apart (views of a packed
    buffer), heads and their values must follow each other. heads is a multiple of kv_heads. Rows behind the last
    sequence come out zero. `rope`: q and k are raw projections, to be normalised and turned here.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert {x.stride()[1:] for x in (q, k, v)} == {(head_dim, 1)}, (
        "heads must be contiguous within a token: pass views of the packed projections"
    )
    num_seqs = len(cu_seqlens) - 1
    tiles = default_tiles(head_dim, num_tokens, num_seqs, causal) if tiles is None else tiles
    out = q.new_empty(q.shape) if out is None else out
    grid = (num_heads, num_tokens // tiles.block_m + num_seqs + 1)
    shape = {
        "GROUP": num_heads // k.shape[1], "NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "CAUSAL": causal,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "STAGES": tiles.num_stages, "num_warps": tiles.num_warps,
    }  # fmt: skip
    strides = (q.stride(0), k.stride(0), v.stride(0))
    if rope is None:
        _attend_kernel[grid](
            q, k, v, out, cu_seqlens, num_seqs, num_tokens, *strides, scale * _LOG2_E, **shape, **pdl(q)
        )
    else:
        _attend_rope_kernel[grid](
            q, k, v, out, cu_seqlens, rope.q_weight, rope.k_weight, rope.cos, rope.sin,
            num_seqs, num_tokens, *strides, scale * _LOG2_E, rope.eps, **shape, **pdl(q),
        )  # fmt: skip
    return out
