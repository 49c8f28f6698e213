"""Attention of rows of few queries (decode, verify) over a paged KV cache, the keys of a row divided among programs.

Lengths and block tables are read on the device: the launch follows from the number of rows alone, so one captured
graph is right for any lengths. The heads that share a KV head and a row's queries are the M rows of one tile, so that
tensor cores multiply and each key is read once. A row's keys are cut into at most `num_splits` parts of at least
`min_keys`; a part leaves its softmax unfinished, with the logarithm of its sum, and a second kernel adds the parts up
in their order (Flash-Decoding): the same bits in every run. A row of one part writes its result at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl
from rose.kernels.ragged_attention import _LOG2_E, _softmax_block

MAX_SHORT = 8  # queries of a row that these kernels take
_PROGRAMS = 528  # four for each multiprocessor of an H200
_MAX_SPLITS, _MIN_SPLITS = 64, 4
_MIN_TILE_ROWS = 16  # of a tensor-core product


class Splits(NamedTuple):
    """A launch: parts of a row at most, keys of a part at least (they are whole tiles), keys of a tile, warps, depth
    of the software pipeline."""

    num_splits: int
    min_keys: int
    block_n: int
    num_warps: int
    num_stages: int


def default_splits(num_rows: int, num_kv_heads: int, head_dim: int, max_keys: int, tile_rows: int) -> Splits:
    """After measurements on an H200 (bench/results/2026-11-30_h200_decode.md).

    Follows from what is known when a graph is captured, never from lengths. `max_keys`: that a row can ever have;
    `tile_rows`: queries of a row times heads that share a KV head. Few rows: parts as short as a tile, to have programs
    for the whole device. Many rows: long parts, so that typical rows have one, but enough of them that a single long
    row does not hold up the step. The more there is to write of a part, the fewer.
    """
    programs = max(1, num_rows * num_kv_heads)
    narrow, few = tile_rows <= _MIN_TILE_ROWS, programs <= 16
    block_n = 128 if narrow and head_dim == 128 else 64
    min_keys = block_n if few else 128 if programs <= 128 else 512 if programs <= 512 else 1024
    num_splits = max(_MIN_SPLITS, min(_MAX_SPLITS, next_power_of_2(-(-_PROGRAMS // programs))))
    num_splits = num_splits if narrow or few else num_splits // 2
    num_splits = min(num_splits, next_power_of_2(-(-max_keys // min_keys)))
    return Splits(num_splits, min_keys, block_n, 4, 3 if head_dim >= 128 else 5)


@triton.jit
def _parts(length, num_splits, min_keys, BLOCK_N: tl.constexpr):
    """(keys of each part, number of parts) of a row of `length` keys; one part of an empty row."""
    each = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    each = tl.maximum(each, min_keys)
    return each, tl.maximum(tl.cdiv(length, each), 1)


@triton.jit(do_not_specialize=["num_tokens", "short", "num_splits", "min_keys"])  # one compilation for all launches
def _attend_part_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, log_ptr, cu_seqlens_q_ptr, kv_lengths_ptr, table_ptr,
    num_tokens, short, num_splits, min_keys, q_stride, table_stride, scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    kv_head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(cu_seqlens_q_ptr + row)
    num_queries = tl.load(cu_seqlens_q_ptr + row + 1) - first
    length = tl.load(kv_lengths_ptr + row)
    each, num_parts = _parts(length, num_splits, min_keys, BLOCK_N)
    if (num_queries > 0) & (num_queries <= short) & (part < num_parts):
        lane = tl.arange(0, HEAD_DIM)
        tile_row = tl.arange(0, BLOCK_M)
        query = tile_row // GROUP
        present = query < num_queries
        position = length - num_queries + query
        head = (first + query).to(tl.int64) * NUM_HEADS + kv_head * GROUP + tile_row % GROUP  # of q and out, flat
        q_at = (first + query).to(tl.int64) * q_stride + (kv_head * GROUP + tile_row % GROUP) * HEAD_DIM
        q = tl.load(q_ptr + q_at[:, None] + lane[None, :], mask=present[:, None], other=0.0)
        acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
        row_max = tl.full((BLOCK_M,), -1e30, tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        begin = part * each
        end = tl.minimum(begin + each, length)
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK_N)
            inside = key < end
            block = tl.load(table_ptr + row * table_stride + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            at = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
            k = tl.load(k_ptr + at[None, :] + lane[:, None], mask=inside[None, :], other=0.0)
            v = tl.load(v_ptr + at[:, None] + lane[None, :], mask=inside[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision="ieee")
            acc, row_max, row_sum = _softmax_block(
                scores, acc, row_max, row_sum, v, key, position, end, scale, True, True
            )
        seen = row_sum > 0.0
        acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
        if num_parts == 1:
            at = head[:, None] * HEAD_DIM + lane[None, :]
            tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=present[:, None])
        else:
            place = part * num_tokens.to(tl.int64) * NUM_HEADS + head
            tl.store(part_ptr + place[:, None] * HEAD_DIM + lane[None, :], acc, mask=present[:, None])
            logarithm = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
            tl.store(log_ptr + place, logarithm, mask=present)


@triton.jit(do_not_specialize=["num_tokens", "short", "min_keys"])
def _merge_kernel(
    out_ptr, part_ptr, log_ptr, cu_seqlens_q_ptr, kv_lengths_ptr, num_tokens, short, min_keys,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head, row, query = tl.program_id(0), tl.program_id(1) // short, tl.program_id(1) % short
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(cu_seqlens_q_ptr + row)
    num_queries = tl.load(cu_seqlens_q_ptr + row + 1) - first
    _, num_parts = _parts(tl.load(kv_lengths_ptr + row), NUM_SPLITS, min_keys, BLOCK_N)
    if (query < num_queries) & (num_queries <= short) & (num_parts > 1):
        lane = tl.arange(0, HEAD_DIM)
        part = tl.arange(0, NUM_SPLITS)
        present = part < num_parts
        place = (part * num_tokens.to(tl.int64) + first + query) * NUM_HEADS + head
        logarithm = tl.load(log_ptr + place, mask=present, other=float("-inf"))
        weight = tl.exp2(logarithm - tl.max(logarithm, axis=0))
        values = tl.load(part_ptr + place[:, None] * HEAD_DIM + lane[None, :], mask=present[:, None], other=0.0)
        result = tl.sum(values * weight[:, None], axis=0) / tl.sum(weight, axis=0)
        at = ((first + query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + lane
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    kv_lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    max_q_len: int,
    splits: Splits | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q [T, heads, head_dim] of R rows -> like q, contiguous; query i of row r sees keys <= kv_lengths[r] - q_len + i.

    k_cache, v_cache [blocks, block_size, kv_heads, head_dim], contiguous; cu_seqlens_q int32 [R+1]; kv_lengths int32
    [R], the row's own queries included; block_table int32 [R, max_blocks], unit stride within a row. Rows of more than
    max_q_len (at most MAX_SHORT) queries are left alone, as is their place in `out`; without `out` what belongs to
    no short row is undefined. Rows without keys come out zero. head_dim a power of two from 16 on; tokens of q may
    be any distance apart, heads of one follow each other.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads, block_size = len(kv_lengths), k_cache.shape[2], k_cache.shape[1]
    assert max_q_len <= MAX_SHORT, f"rows of {max_q_len} queries: use paged_prefill for rows of over {MAX_SHORT}"
    assert q.stride()[1:] == (head_dim, 1), "heads must be contiguous within a token: pass views of the projections"
    assert {k_cache.is_contiguous(), v_cache.is_contiguous(), block_table.stride(1) == 1} == {True}
    assert {cu_seqlens_q.is_contiguous(), kv_lengths.is_contiguous()} == {True}, "read as dense"
    group = num_heads // num_kv_heads
    tile_rows = max(_MIN_TILE_ROWS, next_power_of_2(group * max_q_len))
    if splits is None:
        splits = default_splits(num_rows, num_kv_heads, head_dim, block_table.shape[1] * block_size, tile_rows)
    out = q.new_empty(q.shape) if out is None else out
    divided = splits.num_splits > 1
    part = q.new_empty((splits.num_splits, *q.shape), dtype=torch.float32) if divided else out
    logarithm = q.new_empty((splits.num_splits, num_tokens, num_heads), dtype=torch.float32) if divided else out
    shape = {"HEAD_DIM": head_dim, "BLOCK_N": splits.block_n, **pdl(q)}
    _attend_part_kernel[(num_kv_heads, num_rows, splits.num_splits)](
        q, k_cache, v_cache, out, part, logarithm, cu_seqlens_q, kv_lengths, block_table,
        num_tokens, max_q_len, splits.num_splits, splits.min_keys, q.stride(0), block_table.stride(0), scale * _LOG2_E,
        GROUP=group, NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, BLOCK_M=tile_rows,
        STAGES=splits.num_stages, num_warps=splits.num_warps, **shape,
    )  # fmt: skip
    if divided:
        _merge_kernel[(num_heads, num_rows * max_q_len)](
            out, part, logarithm, cu_seqlens_q, kv_lengths, num_tokens, max_q_len, splits.min_keys,
            NUM_HEADS=num_heads, NUM_SPLITS=splits.num_splits,
            num_warps=max(1, min(4, splits.num_splits * head_dim // 1024)), **shape,
        )  # fmt: skip
    return out
