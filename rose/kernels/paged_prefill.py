"""Causal attention of chunks of a prompt over a paged KV cache: what is cached already, and the chunk itself.

Tiles are found as in rose.kernels.ragged_attention: the grid follows from the number of rows and of new tokens alone.
Rows of few queries may be left to rose.kernels.paged_attention, which divides their keys among programs.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import pdl
from rose.kernels.ragged_attention import _LOG2_E, Tiles, _find, _softmax_block


def default_tiles(head_dim: int) -> Tiles:
    return Tiles(128, 64, 8, 3) if head_dim >= 64 else Tiles(64, 64, 4, 3)


@triton.jit
def _keys(k_ptr, v_ptr, table_at, key, inside, kv_head,
          BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):  # fmt: skip
    """k [HEAD_DIM, N] and v [N, HEAD_DIM] of the positions `key` of the row whose block table begins at `table_at`."""
    lane = tl.arange(0, HEAD_DIM)
    block = tl.load(table_at + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    at = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
    k = tl.load(k_ptr + at[None, :] + lane[:, None], mask=inside[None, :], other=0.0)
    v = tl.load(v_ptr + at[:, None] + lane[None, :], mask=inside[:, None], other=0.0)
    return k, v


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])  # one compilation for every step
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_q_ptr, kv_lengths_ptr, table_ptr,
    num_rows, num_tokens, q_stride, table_stride, scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SHORT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    found, start, end, first = _find(cu_seqlens_q_ptr, tile, num_rows, num_tokens, BLOCK_M)
    num_queries = end - start
    if (first < num_queries) & ((num_queries > SHORT) | (found == num_rows)):
        query = first + tl.arange(0, BLOCK_M)
        lane = tl.arange(0, HEAD_DIM)
        present = (query < num_queries)[:, None]
        token = (start + query).to(tl.int64)[:, None]
        out_at = out_ptr + token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + lane[None, :]
        if found == num_rows:
            tl.store(out_at, tl.zeros((BLOCK_M, HEAD_DIM), out_ptr.dtype.element_ty), mask=present)
        else:
            q = tl.load(q_ptr + token * q_stride + head * HEAD_DIM + lane[None, :], mask=present, other=0.0)
            length = tl.load(kv_lengths_ptr + found)
            cached = length - num_queries
            position = cached + query
            table_at = table_ptr + found.to(tl.int64) * table_stride
            acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
            row_max = tl.full((BLOCK_M,), -1e30, tl.float32)
            row_sum = tl.zeros((BLOCK_M,), tl.float32)
            last = tl.minimum(cached + first + BLOCK_M, length)
            whole = (cached + first + 1) // BLOCK_N * BLOCK_N  # keys in tiles that every query sees whole
            for begin in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
                key = begin + tl.arange(0, BLOCK_N)
                k, v = _keys(k_ptr, v_ptr, table_at, key, key < length, head // GROUP,
                             BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)  # fmt: skip
                scores = tl.dot(q, k, input_precision="ieee")
                acc, row_max, row_sum = _softmax_block(
                    scores, acc, row_max, row_sum, v, key, position, length, scale, False, True
                )
            for begin in tl.range(whole, last, BLOCK_N, num_stages=1):
                key = begin + tl.arange(0, BLOCK_N)
                k, v = _keys(k_ptr, v_ptr, table_at, key, key < length, head // GROUP,
                             BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)  # fmt: skip
                scores = tl.dot(q, k, input_precision="ieee")
                acc, row_max, row_sum = _softmax_block(
                    scores, acc, row_max, row_sum, v, key, position, length, scale, True, True
                )
            result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]  # rows without keys: zero
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=present)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    kv_lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    min_q_len: int = 1,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Arguments and result as of rose.kernels.paged_attention.paged_attention, for rows of any number of queries.

    Rows of fewer than min_q_len queries are left alone, as is their place in `out`. Tokens behind the last row come
    out zero.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = len(kv_lengths), k_cache.shape[2]
    assert q.stride()[1:] == (head_dim, 1), "heads must be contiguous within a token: pass views of the projections"
    assert {k_cache.is_contiguous(), v_cache.is_contiguous(), block_table.stride(1) == 1} == {True}
    tiles = default_tiles(head_dim) if tiles is None else tiles
    out = q.new_empty(q.shape) if out is None else out
    _prefill_kernel[(num_heads, num_tokens // tiles.block_m + num_rows + 1)](
        q, k_cache, v_cache, out, cu_seqlens_q, kv_lengths, block_table,
        num_rows, num_tokens, q.stride(0), block_table.stride(0), scale * _LOG2_E,
        GROUP=num_heads // num_kv_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[1],
        SHORT=min_q_len - 1, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, **pdl(q),
    )  # fmt: skip
    return out
