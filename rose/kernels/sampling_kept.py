"""Distributions of rows, whole, as drafts are drawn from them and accepted by them: what a row keeps, in a few numbers.

With them any tile of a row makes its weights anew (`kept_weights`), bit for bit those of rose.sampling.reference: so
weights of rows are nowhere in memory, and one row keeps many processors busy.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl
from rose.kernels.sampling_choose import (
    FLOORS,
    MAX_LISTED,
    enough_floor,
    floor_weight,
    measure,
    row_best,
    row_params,
    scan,
    thresholds,
)
from rose.kernels.sampling_math import (
    COLUMNS,
    EXACT,
    TILE,
    key_id,
    key_logit,
    line_of,
    order_of,
    scale_bits,
    uniform_bits,
    weight,
)
from rose.sampling import params
from rose.sampling.distribution import WEIGHT_BITS
from rose.sampling.params import Needs
from rose.sampling.philox import STREAM_DRAFT
from rose.sampling.slots import SamplingSlots

NUM_NUMBERS = 8  # int64 a row, of which 6 are used
ORDER, LEAST, TOTAL, ONLY, MAXIMUM, INVERSE = (tl.constexpr(column) for column in range(6))
NUMBERS, _MOST = tl.constexpr(NUM_NUMBERS), tl.constexpr(2**WEIGHT_BITS)
_SEED_LOW, _SEED_HIGH = tl.constexpr(params.SEED_LOW), tl.constexpr(params.SEED_HIGH)
_NUM_FLOORS, _STREAM_DRAFT = tl.constexpr(FLOORS), tl.constexpr(STREAM_DRAFT)
NO_ID = tl.constexpr(0x7FFFFFFF)


class Kept(NamedTuple):
    """Of R rows of adjusted logits."""

    logits: Tensor  # float32 [R, V]
    numbers: Tensor  # int64 [R, 8]


@triton.jit
def _limits_kernel(
    logits_ptr, slots_ptr, table_ptr, floats_ptr, best_ptr, sums_ptr, counts_ptr, listed_ptr, ids_ptr, numbers_ptr,
    row_stride, num_tiles, max_num_seqs, vocab_size, RANDOM: tl.constexpr, TRUNCATION: tl.constexpr,
    MAX_LISTED: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row: least order and least weight of what it keeps, all that weighs together; or its only token."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key = row_best(best_ptr, row, num_tiles, TILES)
    order, least, total = key * 0 - 2147483648, key * 0 + 1, key * 0
    line = line_of(slots_ptr, row, max_num_seqs)
    maximum = key_logit(key)
    inverse, top_k, top_p, least_min_p, truncated = row_params(table_ptr, floats_ptr, line, vocab_size)
    if RANDOM and inverse > 0:
        tile = tl.arange(0, TILES)
        of_row = row * _NUM_FLOORS * num_tiles + tile
        last = sums_ptr + of_row + (_NUM_FLOORS - 1) * num_tiles
        total = tl.sum(tl.load(last, mask=tile < num_tiles, other=0), axis=0)
        if TRUNCATION and truncated:
            floor = enough_floor(sums_ptr, counts_ptr, row, num_tiles, top_k, top_p, vocab_size, TILES)
            of_floor = counts_ptr + of_row + floor * num_tiles
            count = tl.sum(tl.load(of_floor, mask=tile < num_tiles, other=0), axis=0)
            x_ptr = logits_ptr + row * row_stride
            if count <= MAX_LISTED:
                x_ptr = listed_ptr + row * MAX_LISTED
            else:
                count = tl.minimum(vocab_size, NO_ID)
            least = tl.maximum(least_min_p, floor_weight(floor))
            order, least = thresholds(
                x_ptr, count, maximum, inverse, top_k, top_p, least, total, vocab_size, TILE
            )  # fmt: skip
            total, _, _ = measure(x_ptr, count, maximum, inverse, least, order, TILE)
    only = tl.where(total > 0, key * 0 - 1, key_id(key).to(tl.int64))
    numbers_ptr += row * NUMBERS
    tl.store(numbers_ptr + ORDER, order)
    tl.store(numbers_ptr + LEAST, least)
    tl.store(numbers_ptr + TOTAL, tl.where(total > 0, total, _MOST))
    tl.store(numbers_ptr + ONLY, only)
    tl.store(numbers_ptr + MAXIMUM, maximum.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(numbers_ptr + INVERSE, inverse.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def kept_weights(x, column, numbers_ptr):
    """int64 of logits x at columns of a row; numbers_ptr is the row's."""
    maximum = tl.load(numbers_ptr + MAXIMUM).to(tl.int32).to(tl.float32, bitcast=True)
    inverse = tl.load(numbers_ptr + INVERSE).to(tl.int32).to(tl.float32, bitcast=True)
    only = tl.load(numbers_ptr + ONLY)
    w = weight(x, maximum, inverse)
    is_kept = (w >= tl.load(numbers_ptr + LEAST)) & (order_of(x).to(tl.int64) >= tl.load(numbers_ptr + ORDER))
    w = tl.where(is_kept, w, 0)
    return tl.where(only < 0, w, tl.where(column == only, w * 0 + _MOST, w * 0))


@triton.jit
def tile_of(sums_ptr, target, num_tiles, TILES: tl.constexpr, TILE: tl.constexpr):
    """The tile that a draw falls into: its first column, and what the tiles before it weigh together."""
    tile = tl.arange(0, TILES)
    sums = tl.load(sums_ptr + tile, mask=tile < num_tiles, other=0)
    passed = (tl.cumsum(sums, axis=0) <= target) & (tile < num_tiles)
    return tl.sum(passed.to(tl.int32), axis=0) * TILE, tl.sum(tl.where(passed, sums, 0), axis=0)


@triton.jit
def _probabilities_kernel(
    logits_ptr, numbers_ptr, q_ptr, sums_ptr, row_stride, q_stride, num_tiles, vocab_size,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < vocab_size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=float("-inf"))
    w = tl.where(inside, kept_weights(x, column, numbers_ptr + row * NUMBERS), 0)
    total = tl.load(numbers_ptr + row * NUMBERS + TOTAL)
    q = (w.to(tl.float64) / total.to(tl.float64)).to(tl.float32)
    tl.store(q_ptr + row * q_stride + column, q, mask=inside)
    tl.store(sums_ptr + row * num_tiles + tile, tl.sum(w, axis=0))


@triton.jit
def _draw_kernel(
    logits_ptr, slots_ptr, positions_ptr, table_ptr, numbers_ptr, sums_ptr, tokens_ptr, row_stride, num_tiles,
    max_num_seqs, vocab_size, TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    numbers_ptr += row * NUMBERS
    seed, position = table_ptr + line_of(slots_ptr, row, max_num_seqs) * COLUMNS, tl.load(positions_ptr + row)
    high, low = uniform_bits(tl.load(seed + _SEED_LOW), tl.load(seed + _SEED_HIGH), position, _STREAM_DRAFT)
    target = scale_bits(high, low, tl.load(numbers_ptr + TOTAL))
    first, before = tile_of(sums_ptr + row * num_tiles, target, num_tiles, TILES, TILE)
    column = first + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * row_stride + column, mask=column < vocab_size, other=float("-inf"))
    reached = before + tl.cumsum(tl.where(column < vocab_size, kept_weights(x, column, numbers_ptr), 0), axis=0)
    tl.store(tokens_ptr + row, tl.min(tl.where(reached > target, column, NO_ID), axis=0))


def kept(logits: Tensor, state: SamplingSlots, slots: Tensor, needs: Needs) -> Kept:
    """Of adjusted logits float32 [R, V], slots int32 [R]; they are read again later."""
    (num_rows, vocab_size), max_listed = logits.shape, MAX_LISTED
    num_tiles = triton.cdiv(vocab_size, TILE)
    scanned = scan(logits, state, slots, needs, max_listed)
    numbers = logits.new_empty(num_rows, NUM_NUMBERS, dtype=torch.int64)
    _limits_kernel[(num_rows,)](
        logits, slots, state.table, state.floats, *scanned, numbers, logits.stride(0), num_tiles, state.max_num_seqs,
        vocab_size, RANDOM=needs.random, TRUNCATION=needs.truncation, MAX_LISTED=max_listed,
        TILES=next_power_of_2(num_tiles), TILE=TILE, **pdl(logits), **EXACT,
    )  # fmt: skip
    return Kept(logits, numbers)


def draw_drafts(
    logits: Tensor, state: SamplingSlots, slots: Tensor, positions: Tensor, needs: Needs, probabilities: Tensor
) -> Tensor:
    """See rose.sampling.sampler.SamplingOps: int32 [R]; probabilities' rows are contiguous each."""
    assert probabilities.stride(1) == 1, "rows are read as dense"
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    numbers = kept(logits, state, slots, needs).numbers
    tokens = torch.empty_like(positions)
    sums = numbers.new_empty(num_rows, num_tiles)
    _probabilities_kernel[(num_rows, num_tiles)](
        logits, numbers, probabilities, sums, logits.stride(0), probabilities.stride(0), num_tiles, vocab_size,
        TILE=TILE, **pdl(logits), **EXACT,
    )  # fmt: skip
    _draw_kernel[(num_rows,)](
        logits, slots, positions, state.table, numbers, sums, tokens, logits.stride(0), num_tiles, state.max_num_seqs,
        vocab_size, TILES=next_power_of_2(num_tiles), TILE=TILE, **pdl(logits), **EXACT,
    )  # fmt: skip
    return tokens
