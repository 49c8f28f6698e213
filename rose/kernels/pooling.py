"""From hidden states to each row's bytes in one launch: pooling, cut, normalisation, conversion, status.

What becomes of a row stands in a device table [N, 8] (columns of ipc.step, semantics in rose/pooling.py), so one
captured graph serves any mixture. Everything is on the device: lengths, table, byte offsets, failures. Means over
many tokens are summed by tiles first (a second launch), always in the same order.

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

_TILE_TOKENS = 64  # of a partial sum
_TILE_COLUMNS = 256
_CHUNK_TOKENS = 8  # rows of a mean read at a time
_DIRECT_TOKENS = 256  # steps up to so many tokens are pooled without partial sums

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


@triton.jit(do_not_specialize=["num_seqs"])  # one compilation for every step
def _partial_sums_kernel(
    hidden_ptr, cu_seqlens_ptr, table_ptr, partial_ptr, num_seqs, hidden_size,
    DEFAULT_POOLING: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial[tile] = sum of the tile's tokens. Sequence i owns tiles from cu_seqlens[i] // TOKENS + i on."""
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
        row += tl.sum(((seq < num_seqs) & (ends // TOKENS + seq + 1 <= tile)).to(tl.int32), axis=0)
    if row < num_seqs:
        pooling = tl.load(table_ptr + row * _COLUMNS + _POOLING)
        pooling = tl.where(pooling < 0, DEFAULT_POOLING, pooling)
        start = tl.load(cu_seqlens_ptr + row)
        end = tl.load(cu_seqlens_ptr + row + 1)
        first = start + (tile - start // TOKENS - row) * TOKENS
        if (pooling == _MEAN) & (first < end):
            total = tl.zeros((BLOCK,), tl.float32)
            at = hidden_ptr + first.to(tl.int64) * hidden_size + column
            for _ in range(first, tl.minimum(first + TOKENS, end)):
                total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
                at += hidden_size
            tl.store(partial_ptr + tile.to(tl.int64) * hidden_size + column, total, mask=mask)


@triton.jit
def _mean(source_ptr, first, count, length, hidden_size, column, mask, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of `count` rows from `first` on, divided by `length`. [BLOCK] float32."""
    lane = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK, BLOCK), tl.float32)
    for begin in range(0, count, CHUNK):
        row = begin + lane
        at = source_ptr + (first + row).to(tl.int64)[:, None] * hidden_size + column[None, :]
        total += tl.load(at, mask=(row < count)[:, None] & mask[None, :], other=0.0).to(tl.float32)
    return tl.sum(total, axis=0) / length


@triton.jit
def _tanh(x):
    """Of float32; exact at both ends because exp overflows to infinity and underflows to 0."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _pool_kernel(
    source_ptr, partial_ptr, cu_seqlens_ptr, table_ptr, status_ptr, values_ptr, values_float_ptr, vectors_ptr,
    hidden_size,
    DEFAULT_POOLING: tl.constexpr, DEFAULT_NORMALIZE: tl.constexpr, TANH: tl.constexpr, POOLED: tl.constexpr,
    PARTIALS: tl.constexpr, CONVERT: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < hidden_size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(cu_seqlens_ptr + row)
    end = tl.load(cu_seqlens_ptr + row + 1)
    if end > start:
        line_ptr = table_ptr + row * _COLUMNS
        # --- pool
        if POOLED:
            vector = tl.load(source_ptr + row * hidden_size + column, mask=mask, other=0.0).to(tl.float32)
        else:
            pooling = tl.load(line_ptr + _POOLING)
            pooling = tl.where(pooling < 0, DEFAULT_POOLING, pooling)
            if pooling == _MEAN:
                if PARTIALS:
                    count = tl.cdiv(end - start, TOKENS)
                    vector = _mean(partial_ptr, start // TOKENS + row, count, end - start, hidden_size, column, mask,
                                   CHUNK, BLOCK)  # fmt: skip
                else:
                    vector = _mean(source_ptr, start, end - start, end - start, hidden_size, column, mask,
                                   CHUNK, BLOCK)  # fmt: skip
            else:
                token = tl.where(pooling == _CLS, start, end - 1).to(tl.int64)
                vector = tl.load(source_ptr + token * hidden_size + column, mask=mask, other=0.0).to(tl.float32)
        if CONVERT:
            # --- a failed row is all zeros
            status = tl.load(status_ptr + row)
            bad = tl.max(((tl.abs(vector) <= _LARGEST) == 0).to(tl.int32), axis=0)
            status = tl.where((status == _OK) & (bad > 0), _NON_FINITE, status)
            tl.store(status_ptr + row, status)
            # --- cut and normalise
            dimension = tl.load(line_ptr + _DIMENSIONS)
            dimension = tl.where(dimension < 0, hidden_size, dimension)
            kept = column < dimension
            vector = tl.where(kept & (status == _OK), vector, 0.0)
            normalize = tl.load(line_ptr + _NORMALIZE)
            normalize = tl.where(normalize < 0, DEFAULT_NORMALIZE, normalize)
            norm = tl.sqrt(tl.sum(vector * vector, axis=0))
            vector = vector / tl.where(normalize > 0, tl.maximum(norm, 1e-12), 1.0)
            # --- convert
            dtype = tl.load(line_ptr + _DTYPE)
            offset = tl.load(line_ptr + _OFFSET).to(tl.int64)
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
                bits = (kept & (vector >= 0.0) & (status == _OK)).to(tl.int32)
                weights = (1 << tl.arange(0, 8))[None, :]
                packed = tl.sum(tl.reshape(bits, (BLOCK // 8, 8)) * weights, axis=1)
                byte = tl.arange(0, BLOCK // 8)
                tl.store(values_ptr + offset + byte, packed.to(tl.uint8), mask=byte * 8 < dimension)
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
    if not pooled and num_tokens > _DIRECT_TOKENS:
        num_tiles = num_tokens // _TILE_TOKENS + num_seqs
        partial = source.new_empty(num_tiles, hidden_size, dtype=torch.float32)
        columns = min(_TILE_COLUMNS, block)
        _partial_sums_kernel[(num_tiles, triton.cdiv(hidden_size, columns))](
            source, cu_seqlens, table, partial, num_seqs, hidden_size,
            DEFAULT_POOLING=pooling, TOKENS=_TILE_TOKENS, BLOCK=columns,
            num_warps=2, **pdl(source),
        )  # fmt: skip
    floats = None if values is None else values[: len(values) // 4 * 4].view(torch.float32)
    _pool_kernel[(num_seqs,)](
        source, partial, cu_seqlens, table, status, values, floats, vectors, hidden_size,
        DEFAULT_POOLING=pooling, DEFAULT_NORMALIZE=int(defaults.normalize), TANH=defaults.int8_tanh, POOLED=pooled,
        PARTIALS=partial is not None, CONVERT=vectors is None, TOKENS=_TILE_TOKENS, CHUNK=_CHUNK_TOKENS, BLOCK=block,
        num_warps=max(1, min(8, block // 128)), **pdl(source),
    )  # fmt: skip
