"""Acceptance as kernels: rose/speculation/accept.py, bit for bit.

Static shapes, nothing waits for the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl
from rose.kernels.sampling_kept import NO_ID, NUMBERS, TOTAL, Kept, kept_weights, tile_of
from rose.kernels.sampling_math import COLUMNS, EXACT, TILE, line_of, scale_bits, uniform_bits
from rose.sampling import params
from rose.sampling.distribution import WEIGHT_BITS
from rose.sampling.philox import STREAM_ACCEPT, STREAM_RESAMPLE, STREAM_TOKEN
from rose.sampling.slots import SamplingSlots

_ACCEPT, _RESAMPLE = tl.constexpr(STREAM_ACCEPT), tl.constexpr(STREAM_RESAMPLE)
_TOKEN = tl.constexpr(STREAM_TOKEN)
_SEED_LOW, _SEED_HIGH = tl.constexpr(params.SEED_LOW), tl.constexpr(params.SEED_HIGH)
_UNIT = tl.constexpr(2.0**WEIGHT_BITS)


@triton.jit
def _accept_draws_kernel(
    draws_ptr, starts_ptr, drafts_ptr, counts_ptr, tokens_ptr, num_new_ptr, drafts_stride, k,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    entry = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    count = tl.load(counts_ptr + row)
    drawn = tl.load(draws_ptr + start + entry, mask=entry < end - start, other=0)
    draft = tl.load(drafts_ptr + row * drafts_stride + entry, mask=entry < count, other=-1)
    num_accepted = tl.min(tl.where((entry < count) & (drawn == draft), BLOCK, entry), axis=0)
    num_accepted = tl.minimum(num_accepted, count)
    tl.store(tokens_ptr + row * (k + 1) + entry, tl.where(entry <= num_accepted, drawn, 0), mask=entry <= k)
    tl.store(num_new_ptr + row, num_accepted + 1)


def accept_draws(draws: Tensor, starts: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """See rose.speculation.accept.accept_draws; starts int32 [R + 1]: the first place of each row. draws int32 [N],
    drafts int32 [R, k], counts int32 [R] -> tokens int32 [R, k + 1], num_new int32 [R]."""
    num_rows, k = drafts.shape
    assert all(each.is_contiguous() for each in (draws, starts, counts)), "read as dense"
    assert drafts.stride(1) == 1, "rows are read as dense"
    tokens, num_new = draws.new_empty(num_rows, k + 1), torch.empty_like(counts)
    _accept_draws_kernel[(num_rows,)](
        draws, starts, drafts, counts, tokens, num_new, drafts.stride(0), k,
        BLOCK=next_power_of_2(k + 1), num_warps=1, **pdl(draws),
    )  # fmt: skip
    return tokens, num_new


@triton.jit
def _decide_kernel(
    logits_ptr, numbers_ptr, slots_ptr, table_ptr, positions_ptr, starts_ptr, drafts_ptr, counts_ptr, q_ptr,
    tokens_ptr, num_new_ptr, row_stride, drafts_stride, q_row_stride, q_stride, k, max_num_seqs, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row: how many of its drafts are taken, which become its tokens."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts_ptr + row).to(tl.int64)
    count = tl.load(counts_ptr + row)
    num_accepted, going = count * 0, count * 0 + 1
    for index in range(count):
        if going != 0:
            place = start + index
            numbers = numbers_ptr + place * NUMBERS
            draft = tl.load(drafts_ptr + row * drafts_stride + index)
            w = kept_weights(tl.load(logits_ptr + place * row_stride + draft), draft, numbers)
            p = w.to(tl.float64) / tl.load(numbers + TOTAL).to(tl.float64)
            q = tl.load(q_ptr + row * q_row_stride + index * q_stride + draft).to(tl.float64)
            seed = table_ptr + line_of(slots_ptr, place, max_num_seqs) * COLUMNS
            position = tl.load(positions_ptr + place)
            high, low = uniform_bits(tl.load(seed + _SEED_LOW), tl.load(seed + _SEED_HIGH), position, _ACCEPT)
            chance = (high.to(tl.float64) * 2147483648.0 + low.to(tl.float64)) * 2.168404344971009e-19
            going = going * 0
            if chance * q < p:
                going = going + 1
                num_accepted = num_accepted + 1
                tl.store(tokens_ptr + row * (k + 1) + index, draft)
    tl.store(num_new_ptr + row, num_accepted + 1)


@triton.jit
def _left(
    logits_ptr, numbers_ptr, q_ptr, column, vocab_size, residual
):  # fmt: skip
    """A tile's weights at a place, and what p has there more than q where `residual`; int64."""
    inside = column < vocab_size
    x = tl.load(logits_ptr + column, mask=inside, other=float("-inf"))
    w = tl.where(inside, kept_weights(x, column, numbers_ptr), 0)
    more = w * 0
    if residual:
        q = tl.load(q_ptr + column, mask=inside, other=0.0).to(tl.float64)
        difference = w.to(tl.float64) / tl.load(numbers_ptr + TOTAL).to(tl.float64) - q
        more = (tl.where(difference > 0, difference, 0.0) * _UNIT).to(tl.int64)
    return w, more


@triton.jit
def _left_kernel(
    logits_ptr, numbers_ptr, starts_ptr, counts_ptr, q_ptr, num_new_ptr, sums_ptr, row_stride, q_row_stride, q_stride,
    num_tiles, k, vocab_size, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums int64 [R, 2, num_tiles], at the place behind what was taken: weights, and what p has more than q."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_accepted = tl.load(num_new_ptr + row) - 1
    place = tl.load(starts_ptr + row).to(tl.int64) + num_accepted
    w, more = _left(
        logits_ptr + place * row_stride, numbers_ptr + place * NUMBERS,
        q_ptr + row * q_row_stride + tl.minimum(num_accepted, k - 1) * q_stride,
        tile * TILE + tl.arange(0, TILE), vocab_size, num_accepted < tl.load(counts_ptr + row),
    )  # fmt: skip
    tl.store(sums_ptr + row * 2 * num_tiles + tile, tl.sum(w, axis=0))
    tl.store(sums_ptr + (row * 2 + 1) * num_tiles + tile, tl.sum(more, axis=0))


@triton.jit
def _draw_left_kernel(
    logits_ptr, numbers_ptr, slots_ptr, table_ptr, positions_ptr, starts_ptr, q_ptr, num_new_ptr, sums_ptr, tokens_ptr,
    row_stride, q_row_stride, q_stride, num_tiles, k, max_num_seqs, vocab_size,
    ENTRIES: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row: the token behind what was taken, and zeros behind that."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_accepted = tl.load(num_new_ptr + row) - 1
    place = tl.load(starts_ptr + row).to(tl.int64) + num_accepted
    tile = tl.arange(0, TILES)
    own = sums_ptr + row * 2 * num_tiles
    more = tl.sum(tl.load(own + num_tiles + tile, mask=tile < num_tiles, other=0), axis=0)
    residual = more > 0  # p and q are one where it is not: no draft is rejected but by rounding
    total = tl.where(residual, more, tl.sum(tl.load(own + tile, mask=tile < num_tiles, other=0), axis=0))
    sums = own + tl.where(residual, num_tiles, 0)
    seed = table_ptr + line_of(slots_ptr, place, max_num_seqs) * COLUMNS
    stream, position = tl.where(residual, _RESAMPLE, _TOKEN), tl.load(positions_ptr + place)
    high, low = uniform_bits(tl.load(seed + _SEED_LOW), tl.load(seed + _SEED_HIGH), position, stream)
    target = scale_bits(high, low, total)
    first, before = tile_of(sums, target, num_tiles, TILES, TILE)
    column = first + tl.arange(0, TILE)
    w, more = _left(
        logits_ptr + place * row_stride, numbers_ptr + place * NUMBERS,
        q_ptr + row * q_row_stride + tl.minimum(num_accepted, k - 1) * q_stride, column, vocab_size, residual,
    )  # fmt: skip
    reached = before + tl.cumsum(tl.where(residual, more, w), axis=0)
    token = tl.min(tl.where(reached > target, column, NO_ID), axis=0)
    entry = tl.arange(0, ENTRIES)
    behind = (entry >= num_accepted) & (entry <= k)
    tl.store(tokens_ptr + row * (k + 1) + entry, tl.where(entry == num_accepted, token, 0), mask=behind)


class DrawnAt(NamedTuple):
    """The N places that tokens may be drawn at, of R rows: see rose.speculation.accept.Places. int32 each."""

    slots: Tensor  # [N]
    positions: Tensor  # [N]
    starts: Tensor  # [R + 1]: the first place of each row


def accept_drawn(
    kept: Kept, state: SamplingSlots, at: DrawnAt, drafts: Tensor, counts: Tensor, probabilities: Tensor
) -> tuple[Tensor, Tensor]:
    """See rose.speculation.accept.accept_drawn: `kept` of N places, drafts int32 [R, k], counts int32 [R],
    probabilities float32 [R, k, V], the last dimension of each contiguous -> tokens int32 [R, k + 1], num_new int32
    [R]."""
    logits, numbers = kept
    (num_rows, k), vocab_size = drafts.shape, logits.shape[1]
    num_tiles = triton.cdiv(vocab_size, TILE)
    assert all(each.is_contiguous() for each in (numbers, *at, counts)), "read as dense"
    assert all(each.stride(-1) == 1 for each in (logits, drafts, probabilities)), "rows are read as dense"
    tokens, num_new = drafts.new_empty(num_rows, k + 1), torch.empty_like(counts)
    sums = numbers.new_empty(num_rows, 2, num_tiles)
    launch, strides = {**pdl(logits), **EXACT}, (logits.stride(0), *probabilities.stride()[:2])
    _decide_kernel[(num_rows,)](
        logits, numbers, at.slots, state.table, at.positions, at.starts, drafts, counts, probabilities, tokens, num_new,
        logits.stride(0), drafts.stride(0), *strides[1:], k, state.max_num_seqs, **launch,
    )  # fmt: skip
    _left_kernel[(num_rows, num_tiles)](
        logits, numbers, at.starts, counts, probabilities, num_new, sums, *strides, num_tiles, k, vocab_size,
        TILE=TILE, **launch,
    )  # fmt: skip
    _draw_left_kernel[(num_rows,)](
        logits, numbers, at.slots, state.table, at.positions, at.starts, probabilities, num_new, sums, tokens, *strides,
        num_tiles, k, state.max_num_seqs, vocab_size,
        ENTRIES=next_power_of_2(k + 1), TILES=next_power_of_2(num_tiles), TILE=TILE, **launch,
    )  # fmt: skip
    return tokens, num_new
