"""From hidden states to each row's bytes in one launch: pooling, cut, normalisation, conversion, status.

What becomes of a row stands in a device table [N, 8] (columns of ipc.step, semantics in rose/pooling.py), so one
captured graph serves any mixture. Everything is on the device: lengths, table, byte offsets, failures. Means are
summed by tiles of tokens and columns first, all at once (a launch of its own), then tile by tile: no atomics, always
the same order.

    hidden [T, H], cu_seqlens [N+1], table [N, 8]  ->  output bytes, each row at its offset; status [N]
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ipc.step import (
    DTYPE_CODES,
    POOLING_CODES,
    ROW_DIMENSIONS,
    ROW_DTYPE,
    ROW_NORMALIZE,
    ROW_OUTPUT_OFFSET,
    ROW_POOLING,
    STATUS_NON_FINITE,
    STATUS_OK,
)
from rose.kernels.launch import next_power_of_2, pdl

_LANES = 32  # tokens of a partial sum that one program reads at once
_TILE_COLUMNS = 128
_MAX_TILES = 32  # partial sums of a step that are aimed at: the second launch adds them
_MAX_TILE_TOKENS = 256
_CHUNK = 16  # rows of a mean read at a time
_DIRECT_TOKENS = 32  # steps up to so many tokens are pooled without partial sums

_POOLING, _DTYPE, _DIMENSIONS = tl.constexpr(ROW_POOLING), tl.constexpr(ROW_DTYPE), tl.constexpr(ROW_DIMENSIONS)
_NORMALIZE, _OFFSET = tl.constexpr(ROW_NORMALIZE), tl.constexpr(ROW_OUTPUT_OFFSET)
_CLS, _MEAN, _LAST = (tl.constexpr(POOLING_CODES[name]) for name in ("cls", "mean", "last_token"))
_FLOAT32, _INT8, _BINARY = (tl.constexpr(DTYPE_CODES[name]) for name in ("float32", "int8", "binary"))
_OK, _NON_FINITE = tl.constexpr(STATUS_OK), tl.constexpr(STATUS_NON_FINITE)
_COLUMNS = tl.constexpr(8)  # of the table
_LARGEST = tl.constexpr(3.4028234663852886e38)  # finite float32
_SMALLEST = tl.constexpr(1.1754943508222875e-38)
_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds to the nearest even integer


class Defaults(NamedTuple):
    """What -1 in the table stands for, and how int8 rows are made: by tanh, or scaled to the largest value."""

    pooling: str
    normalize: bool
    int8_tanh: bool


@triton.jit
def _sum_rows(source_ptr, first, count, hidden_size, column, mask, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of `count` rows from `first` on, LANES of them in flight at a time. [BLOCK] float32."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES, BLOCK), tl.float32)
    for begin in range(0, count, LANES):
        row = begin + lane
        at = source_ptr + (first + row).to(tl.int64)[:, None] * hidden_size + column[None, :]
        total += tl.load(at, mask=(row < count)[:, None] & mask[None, :], other=0.0).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["num_seqs", "tile_tokens"])  # one compilation for every step
def _partial_sums_kernel(
    hidden_ptr, cu_seqlens_ptr, table_ptr, partial_ptr, num_seqs, tile_tokens, hidden_size,
    DEFAULT_POOLING: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial[tile] = sum of the tile's tokens. Sequence i owns tiles from cu_seqlens[i] // tile_tokens + i on."""
    tile = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden_size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tile * 0
    for begin in range(0, num_seqs, 128):
        seq = begin + tl.arange(0, 128)
        ends = tl.load(cu_seqlens_ptr + 1 + seq, mask=seq < num_seqs, other=0)
        row += tl.sum(((seq < num_seqs) & (ends // tile_tokens + seq + 1 <= tile)).to(tl.int32), axis=0)
    if row < num_seqs:
        pooling = tl.load(table_ptr + row * _COLUMNS + _POOLING)
        pooling = tl.where(pooling < 0, DEFAULT_POOLING, pooling)
        start = tl.load(cu_seqlens_ptr + row)
        end = tl.load(cu_seqlens_ptr + row + 1)
        first = start + (tile - start // tile_tokens - row) * tile_tokens
        if (pooling == _MEAN) & (first < end):
            count = tl.minimum(tile_tokens, end - first)
            total = _sum_rows(hidden_ptr, first, count, hidden_size, column, mask, LANES, BLOCK)
            tl.store(partial_ptr + tile.to(tl.int64) * hidden_size + column, total, mask=mask)


@triton.jit
def _tanh(x):
    """Of float32; exact at both ends because exp overflows to infinity and underflows to 0."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _store_row(
    vector, kept, good, dtype, offset, dimension, values_ptr, values_float_ptr, TANH: tl.constexpr, BLOCK: tl.constexpr
):
    """The row's bytes at `offset`: its first `dimension` values (`kept`) as `dtype`; none is `good` in a failed row."""
    column = tl.arange(0, BLOCK)
    if dtype == _FLOAT32:
        tl.store(values_float_ptr + offset // 4 + column, vector, mask=kept)
    if dtype == _INT8:
        if TANH:
            scaled = _tanh(vector)
        else:
            scaled = vector / tl.maximum(tl.max(tl.abs(vector), axis=0), _SMALLEST)
        rounded = (scaled * 127.0 + _ROUND) - _ROUND
        tl.store(values_ptr + offset + column, rounded.to(tl.int8).to(tl.uint8, bitcast=True), mask=kept)
    if dtype == _BINARY:
        bits = (good & (vector >= 0.0)).to(tl.int32)
        weights = (1 << tl.arange(0, 8))[None, :]
        packed = tl.sum(tl.reshape(bits, (BLOCK // 8, 8)) * weights, axis=1)
        byte = tl.arange(0, BLOCK // 8)
        tl.store(values_ptr + offset + byte, packed.to(tl.uint8), mask=byte * 8 < dimension)


@triton.jit(do_not_specialize=["tile_tokens"])
def _pool_kernel(
    source_ptr, partial_ptr, cu_seqlens_ptr, table_ptr, status_ptr, values_ptr, values_float_ptr, vectors_ptr,
    tile_tokens, hidden_size,
    DEFAULT_POOLING: tl.constexpr, DEFAULT_NORMALIZE: tl.constexpr, TANH: tl.constexpr, POOLED: tl.constexpr,
    PARTIALS: tl.constexpr, CONVERT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < hidden_size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # all that is small is asked for at once: each load waited for alone costs as much as the arithmetic
    start = tl.load(cu_seqlens_ptr + row)
    end = tl.load(cu_seqlens_ptr + row + 1)
    line_ptr = table_ptr + row * _COLUMNS
    pooling = tl.load(line_ptr + _POOLING)
    dtype = tl.load(line_ptr + _DTYPE)
    dimension = tl.load(line_ptr + _DIMENSIONS)
    normalize = tl.load(line_ptr + _NORMALIZE)
    offset = tl.load(line_ptr + _OFFSET).to(tl.int64)
    if CONVERT:
        status = tl.load(status_ptr + row)
    if end > start:
        # --- pool
        pooling = tl.where(pooling < 0, DEFAULT_POOLING, pooling)
        if POOLED:
            vector = tl.load(source_ptr + row * hidden_size + column, mask=mask, other=0.0).to(tl.float32)
        elif pooling == _MEAN:
            if PARTIALS:
                count = tl.cdiv(end - start, tile_tokens)
                first = start // tile_tokens + row
                vector = _sum_rows(partial_ptr, first, count, hidden_size, column, mask, CHUNK, BLOCK)
            else:
                vector = _sum_rows(source_ptr, start, end - start, hidden_size, column, mask, CHUNK, BLOCK)
            vector = vector / (end - start)
        else:
            token = tl.where(pooling == _CLS, start, end - 1).to(tl.int64)
            vector = tl.load(source_ptr + token * hidden_size + column, mask=mask, other=0.0).to(tl.float32)
        if CONVERT:
            # --- a failed row is all zeros
            bad = tl.max(((tl.abs(vector) <= _LARGEST) == 0).to(tl.int32), axis=0)
            status = tl.where((status == _OK) & (bad > 0), _NON_FINITE, status)
            tl.store(status_ptr + row, status)
            # --- cut and normalise
            dimension = tl.where(dimension < 0, hidden_size, dimension)
            kept = column < dimension
            good = kept & (status == _OK)
            vector = tl.where(good, vector, 0.0)
            normalize = tl.where(normalize < 0, DEFAULT_NORMALIZE, normalize)
            norm = tl.sqrt(tl.sum(vector * vector, axis=0))
            vector = vector / tl.where(normalize > 0, tl.maximum(norm, 1e-12), 1.0)
            _store_row(vector, kept, good, dtype, offset, dimension, values_ptr, values_float_ptr, TANH, BLOCK)
        else:
            tl.store(vectors_ptr + row.to(tl.int64) * hidden_size + column, vector, mask=mask)


def pool_rows(
    hidden: Tensor, cu_seqlens: Tensor, table: Tensor, status: Tensor, values: Tensor, defaults: Defaults
) -> None:
    """Pools and converts N rows; an empty sequence (padding) writes nothing.

    hidden [T, H] contiguous; cu_seqlens int32 [N+1]; table int32 [N, 8]; status int32 [N], in: STATUS_OK or what the
    row failed with before, out: also STATUS_NON_FINITE; values uint8, 16-byte aligned, each row at ROW_OUTPUT_OFFSET
    (a multiple of 4).
    """
    _launch(hidden, cu_seqlens, table, status, values, None, defaults, pooled=False)


def convert_rows(
    vectors: Tensor, cu_seqlens: Tensor, table: Tensor, status: Tensor, values: Tensor, defaults: Defaults
) -> None:
    """The same for rows pooled already, or scores: vectors float32 [N, D] contiguous."""
    _launch(vectors, cu_seqlens, table, status, values, None, defaults, pooled=True)


def pool_vectors(hidden: Tensor, cu_seqlens: Tensor, table: Tensor, defaults: Defaults) -> Tensor:
    """Pools alone, by each row's ROW_POOLING: float32 [N, H]; rows of empty sequences are zero."""
    vectors = hidden.new_zeros(len(table), hidden.shape[1], dtype=torch.float32)
    _launch(hidden, cu_seqlens, table, None, None, vectors, defaults, pooled=False)
    return vectors


def _launch(
    source: Tensor, cu_seqlens: Tensor, table: Tensor, status: Tensor | None, values: Tensor | None,
    vectors: Tensor | None, defaults: Defaults, *, pooled: bool,
) -> None:  # fmt: skip
    num_tokens, hidden_size = source.shape
    num_seqs = len(table)
    block = next_power_of_2(max(8, hidden_size))
    pooling = POOLING_CODES[defaults.pooling]
    partial = None
    tile_tokens = _tile_tokens(num_tokens)
    if not pooled and num_tokens > _DIRECT_TOKENS:
        num_tiles = num_tokens // tile_tokens + num_seqs
        partial = source.new_empty(num_tiles, hidden_size, dtype=torch.float32)
        columns = min(_TILE_COLUMNS, block)
        _partial_sums_kernel[(num_tiles, triton.cdiv(hidden_size, columns))](
            source, cu_seqlens, table, partial, num_seqs, tile_tokens, hidden_size,
            DEFAULT_POOLING=pooling, LANES=_LANES, BLOCK=columns, num_warps=4, **pdl(source),
        )  # fmt: skip
    floats = None if values is None else values[: len(values) // 4 * 4].view(torch.float32)
    _pool_kernel[(num_seqs,)](
        source, partial, cu_seqlens, table, status, values, floats, vectors, tile_tokens, hidden_size,
        DEFAULT_POOLING=pooling, DEFAULT_NORMALIZE=int(defaults.normalize), TANH=defaults.int8_tanh, POOLED=pooled,
        PARTIALS=partial is not None, CONVERT=vectors is None, CHUNK=_CHUNK, BLOCK=block,
        num_warps=max(1, min(8, block // 128)), **pdl(source),
    )  # fmt: skip


def _tile_tokens(num_tokens: int) -> int:
    """Tokens of a partial sum, by the step's size alone: the order of addition must not follow from the lengths."""
    tokens = _LANES
    while num_tokens > _MAX_TILES * tokens and tokens < _MAX_TILE_TOKENS:
        tokens *= 2
    return tokens
