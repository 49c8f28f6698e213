"""Attention of rows of few queries (decode, verify) over a paged KV cache, the keys of a row divided among programs.

Lengths and block tables are read on the device: the launch follows from the number of rows alone, so one captured
graph is right for any lengths. The heads that share a KV head and a row's queries are the M rows of one tile, so that
tensor cores multiply and each key is read once. A row's keys are cut into at most `num_splits` parts of at least
`min_keys`; a part leaves its softmax unfinished, with the logarithm of its sum (Flash-Decoding), and counts itself; who
finds that all others are there adds the parts up, always in their order: the same bits in every run. A row of one part
writes its result at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl, stages_that_fit
from rose.kernels.ragged_attention import _LOG2_E, _softmax_block

MAX_SHORT = 8  # queries of a row that these kernels take
_MIN_TILE_ROWS = 16  # of a tensor-core product
_WARP_GROUP_ROWS = 64  # from which on it reads all it multiplies from shared memory
_MERGE_ROWS, _MERGE_PARTS = 8, 16  # added up at once
NUM_COUNTERS = 1 << 16  # rows times KV heads of a launch that divides its rows


class Splits(NamedTuple):
    """A launch: parts of a row at most, keys of a part at least (they are whole tiles), keys of a tile, warps, depth
    of the software pipeline (two at least)."""

    num_splits: int
    min_keys: int
    block_n: int
    num_warps: int
    num_stages: int


def default_splits(num_rows: int, num_kv_heads: int, head_dim: int, max_keys: int, tile_rows: int) -> Splits:
    """After measurements on an H200, within layers (bench/results/2026-11-30_h200_decode-layer.md).

    Follows from what is known when a graph is captured, never from lengths. `max_keys`: that a row can ever have;
    `tile_rows`: queries of a row times heads that share a KV head. Few rows: parts as short as a tile, to have programs
    for the whole device. Many rows: parts so long that typical rows have one, a longer row four; tiles so small that
    several programs share a multiprocessor.
    """
    programs, narrow = max(1, num_rows * num_kv_heads), tile_rows <= _MIN_TILE_ROWS
    if programs <= 16:
        found = Splits(64, 64, 64, 4, 3) if head_dim <= 64 else Splits(32, 64, 64, 4, 4)
    elif programs <= 64:
        found = Splits(256 // next_power_of_2(programs), 128, 64, 4, 4)
    elif programs <= 128:
        large = narrow and head_dim <= 128
        found = Splits(4, 4096, 128, 4, 3) if large else Splits(4, 256, 64, 4, 3)
    else:
        found = Splits(4, 4096, 32 if programs > 256 else 64, 4, 4) if narrow else Splits(4, 4096, 64, 4, 3)
    return found._replace(num_splits=min(found.num_splits, next_power_of_2(-(-max_keys // found.min_keys))))


@triton.jit
def _parts(length, num_splits, min_keys, BLOCK_N: tl.constexpr):
    """(keys of each part, number of parts) of a row of `length` keys; one part of an empty row."""
    each = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    each = tl.maximum(each, min_keys)
    return each, tl.maximum(tl.cdiv(length, each), 1)


@triton.jit
def _blocks(table_ptr, key, end, BLOCK_SIZE: tl.constexpr):
    """Of a row's keys before `end`; table_ptr is the row's."""
    return tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)


@triton.jit
def _merge(
    out_ptr, part_ptr, log_ptr, first, num_queries, num_parts, part_heads, kv_head,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of the heads that share a KV head, of all queries of a row. Reads past L1: others wrote."""
    lane = tl.arange(0, HEAD_DIM)
    for begin in tl.range(0, num_queries * GROUP, ROWS, num_stages=1):
        tile_row = begin + tl.arange(0, ROWS)
        query = tile_row // GROUP
        present = query < num_queries
        head = (first + query).to(tl.int64) * NUM_HEADS + kv_head * GROUP + tile_row % GROUP
        acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        row_max = tl.full((ROWS,), -1e30, tl.float32)
        row_sum = tl.zeros((ROWS,), tl.float32)
        for begin_part in tl.range(0, num_parts, AT_ONCE, num_stages=1):
            for index in tl.static_range(AT_ONCE):  # their loads are under way together
                part = begin_part + index
                here = query < tl.where(part < num_parts, num_queries, 0)
                place = part * part_heads + head
                values = tl.load(
                    part_ptr + place[:, None] * HEAD_DIM + lane[None, :],
                    mask=here[:, None], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                logarithm = tl.load(log_ptr + place, mask=here, other=float("-inf"), cache_modifier=".cg")
                new_max = tl.maximum(row_max, logarithm)
                kept, weight = tl.exp2(row_max - new_max), tl.exp2(logarithm - new_max)
                acc = acc * kept[:, None] + values * weight[:, None]
                row_sum = row_sum * kept + weight
                row_max = new_max
        result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        at = head[:, None] * HEAD_DIM + lane[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=present[:, None])


@triton.jit
def _count(counter):
    """Programs that were there before this one. One thread counts: behind all stores of the program (barrier, release)
    and before its loads (acquire)."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit(do_not_specialize=["num_tokens", "short", "num_splits", "min_keys"])  # one compilation for all lengths
def _attend_part_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, log_ptr, counter_ptr, cu_seqlens_q_ptr, kv_lengths_ptr, table_ptr,
    num_tokens, short, num_splits, min_keys, q_stride, table_stride, scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGE_PARTS: tl.constexpr, PDL: tl.constexpr,
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
        lane, tile_row = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_M)
        query = tile_row // GROUP
        present = query < num_queries
        position = length - num_queries + query
        q_at = (first + query).to(tl.int64) * q_stride + (kv_head * GROUP + tile_row % GROUP) * HEAD_DIM
        q = tl.load(q_ptr + q_at[:, None] + lane[None, :], mask=present[:, None], other=0.0)
        acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
        row_max = tl.full((BLOCK_M,), -1e30, tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        begin = part * each
        end = tl.minimum(begin + each, length)
        table_ptr += row * table_stride
        block = _blocks(table_ptr, begin + tl.arange(0, BLOCK_N), end, BLOCK_SIZE)  # known before its tile's turn
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK_N)
            inside = key < end
            at = ((block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
            k = tl.load(k_ptr + at[None, :] + lane[:, None], mask=inside[None, :], other=0.0)
            v = tl.load(v_ptr + at[:, None] + lane[None, :], mask=inside[:, None], other=0.0)
            block = _blocks(table_ptr, key + BLOCK_N, end, BLOCK_SIZE)
            scores = tl.dot(q, k, input_precision="ieee")
            acc, row_max, row_sum = _softmax_block(
                scores, acc, row_max, row_sum, v, key, position, end, scale, True, True
            )
        seen = row_sum > 0.0
        acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
        head = (first + query).to(tl.int64) * NUM_HEADS + kv_head * GROUP + tile_row % GROUP  # of q and out, flat
        held = tile_row < num_queries * GROUP  # `present`, made again: else it is kept through the loop, in memory
        if num_parts == 1:
            at = head[:, None] * HEAD_DIM + lane[None, :]
            tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=held[:, None])
        else:
            part_heads = num_tokens.to(tl.int64) * NUM_HEADS
            place = part * part_heads + head
            tl.store(part_ptr + place[:, None] * HEAD_DIM + lane[None, :], acc, mask=held[:, None])
            logarithm = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
            tl.store(log_ptr + place, logarithm, mask=held)
            if _count(counter_ptr + row * NUM_KV_HEADS + kv_head) == num_parts - 1:
                tl.store(counter_ptr + row * NUM_KV_HEADS + kv_head, 0)  # for the next launch
                _merge(
                    out_ptr, part_ptr, log_ptr, first, num_queries, num_parts, part_heads, kv_head,
                    GROUP, NUM_HEADS, HEAD_DIM, MERGE_ROWS, MERGE_PARTS,
                )  # fmt: skip


def new_counters(device: torch.device) -> Tensor:
    """Where the parts of rows are counted, for `paged_attention`: int32 [NUM_COUNTERS], zeros between launches."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


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
    counters: Tensor | None = None,
) -> Tensor:
    """q [T, heads, head_dim] of R rows -> like q, contiguous; query i of row r sees keys <= kv_lengths[r] - q_len + i.

    k_cache, v_cache [blocks, block_size, kv_heads, head_dim], contiguous; cu_seqlens_q int32 [R+1]; kv_lengths int32
    [R], the row's own queries included; block_table int32 [R, max_blocks], unit stride within a row. Rows of more than
    max_q_len (at most MAX_SHORT) queries are left alone, as is their place in `out`; without `out` what belongs to
    no short row is undefined. Rows without keys come out zero. head_dim a power of two from 16 on; tokens of q may
    be any distance apart, heads of one follow each other. `counters`, int32 zeros, are zero again afterwards: launches
    that follow one another share them, in graphs and out of them; without them a launch makes its own. A launch of
    more rows times KV heads than counters does not divide its rows.
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
    programs = num_rows * num_kv_heads
    divided = splits.num_splits > 1 and (counters is None or programs <= len(counters))
    num_splits = splits.num_splits if divided else 1
    part = q.new_empty((num_splits, *q.shape), dtype=torch.float32) if divided else out
    logarithm = q.new_empty((num_splits, num_tokens, num_heads), dtype=torch.float32) if divided else out
    if counters is None:
        counters = kv_lengths.new_zeros(programs) if divided else kv_lengths  # not read otherwise
    tile_bytes = 2 * splits.block_n * head_dim * q.element_size()  # of keys and values
    other_bytes = tile_rows * (head_dim + splits.block_n) * q.element_size()
    free = 1 if tile_rows < _WARP_GROUP_ROWS else 0  # of the tiles under way one is held in registers
    num_stages = free + stages_that_fit(splits.num_stages - free, tile_bytes, q, other_bytes)
    _attend_part_kernel[(num_kv_heads, num_rows, num_splits)](
        q, k_cache, v_cache, out, part, logarithm, counters, cu_seqlens_q, kv_lengths, block_table,
        num_tokens, max_q_len, num_splits, splits.min_keys, q.stride(0), block_table.stride(0), scale * _LOG2_E,
        GROUP=group, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_M=tile_rows,
        BLOCK_N=splits.block_n, STAGES=num_stages,
        MERGE_ROWS=min(_MERGE_ROWS, next_power_of_2(group * max_q_len)), MERGE_PARTS=_MERGE_PARTS,
        num_warps=splits.num_warps, **pdl(q),
    )  # fmt: skip
    return out
