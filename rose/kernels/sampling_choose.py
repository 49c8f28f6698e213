"""From adjusted logits to tokens: the largest, or one drawn from the distribution that a row's parameters leave.

A row is cut into tiles, a program each, so that one row keeps many processors busy; what tiles find is combined in
integers, whose order does not matter. Steps, each a launch:

    best     each tile's largest logit and where
    sums     each tile's weight; of rows to be truncated by 16 floors, each a quarter of the one before
    compact  rows to be truncated: the tokens above the highest floor that keeps enough, to a list in their order
    pick     a row: thresholds by search in its list (or, where that is too long, in the row), the draw

Greedy steps are best and pick alone. The distribution is that of rose/sampling/distribution.py, bit for bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl
from rose.kernels.sampling_math import (
    COLUMNS,
    EXACT,
    NO_KEY,
    TILE,
    key_id,
    key_logit,
    keys_of,
    line_of,
    order_of,
    scale_bits,
    uniform_bits,
    weight,
)
from rose.sampling import params
from rose.sampling.distribution import WEIGHT_BITS
from rose.sampling.params import Needs
from rose.sampling.philox import STREAM_TOKEN
from rose.sampling.slots import SamplingSlots

MAX_LISTED = 8192  # tokens of a row's list
FLOORS = 16  # the last is one unit of weight
_FLOOR_BITS = 2  # between one and the next

_SEED_LOW, _SEED_HIGH = tl.constexpr(params.SEED_LOW), tl.constexpr(params.SEED_HIGH)
_TOP_K, _TOP_P, _MIN_P = tl.constexpr(params.TOP_K), tl.constexpr(params.TOP_P), tl.constexpr(params.MIN_P)
_INVERSE_TEMPERATURE = tl.constexpr(params.INVERSE_TEMPERATURE)
_NUM_FLOORS, _BITS = tl.constexpr(FLOORS), tl.constexpr(_FLOOR_BITS)
_WEIGHT_BITS, _UNIT = tl.constexpr(WEIGHT_BITS), tl.constexpr(2.0**WEIGHT_BITS)
_MOST = tl.constexpr(2**WEIGHT_BITS)
_STREAM_TOKEN = tl.constexpr(STREAM_TOKEN)
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def best_kernel(
    logits_ptr, best_ptr, row_stride, num_tiles, vocab_size, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """best int64 [R, num_tiles]: the tile's largest key."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits_ptr + row * row_stride + column, mask=column < vocab_size, other=0.0)
    keys = tl.where(column < vocab_size, keys_of(x, column), NO_KEY)
    tl.store(best_ptr + row * num_tiles + tile, tl.max(keys, axis=0))


@triton.jit
def row_best(best_ptr, row, num_tiles, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(best_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=NO_KEY), axis=0)


@triton.jit
def floor_weight(floor):
    """The weight that it stands for; the last one's is a single unit."""
    one = tl.full((), 1, tl.int64)
    floor = one * floor
    return one << tl.where(floor < _NUM_FLOORS - 1, floor * -_BITS + _WEIGHT_BITS, 0)


@triton.jit
def row_params(table_ptr, floats_ptr, line, vocab_size):
    """inverse temperature, top_k (vocab_size: off), top_p (negative: off), least weight of min_p, whether truncated."""
    inverse = tl.load(floats_ptr + line * COLUMNS + _INVERSE_TEMPERATURE)
    top_k = tl.minimum(tl.load(table_ptr + line * COLUMNS + _TOP_K), vocab_size)
    top_p = tl.load(table_ptr + line * COLUMNS + _TOP_P)
    least = tl.maximum((tl.load(floats_ptr + line * COLUMNS + _MIN_P) * _UNIT).to(tl.int64), 1)
    return inverse, top_k, top_p, least, (top_k < vocab_size) | (top_p >= 0) | (least > 1)


@triton.jit
def _needed(top_p, total):
    """Weight that top_p asks for."""
    return tl.maximum(scale_bits(top_p.to(tl.int64), total * 0, total), 1)


@triton.jit
def _sums_kernel(
    logits_ptr, slots_ptr, table_ptr, floats_ptr, best_ptr, sums_ptr, numbers_ptr, row_stride, num_tiles, max_num_seqs,
    vocab_size, TRUNCATION: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums int64, numbers int32 [R, 16, num_tiles]: of a tile's tokens above each floor; else sums of the last only."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = line_of(slots_ptr, row, max_num_seqs)
    inverse, _, _, least, truncated = row_params(table_ptr, floats_ptr, line, vocab_size)
    if inverse > 0:
        maximum = key_logit(row_best(best_ptr, row, num_tiles, TILES))
        x = tl.load(logits_ptr + row * row_stride + column, mask=column < vocab_size, other=float("-inf"))
        w = weight(x, maximum, inverse)
        at = row * _NUM_FLOORS * num_tiles + tile
        if TRUNCATION and truncated:
            w = tl.where(w >= least, w, 0)
            for floor in range(_NUM_FLOORS):
                above = w >= floor_weight(floor)
                tl.store(sums_ptr + at + floor * num_tiles, tl.sum(tl.where(above, w, 0), axis=0))
                tl.store(numbers_ptr + at + floor * num_tiles, tl.sum(above.to(tl.int32), axis=0))
        else:
            tl.store(sums_ptr + at + (_NUM_FLOORS - 1) * num_tiles, tl.sum(w, axis=0))


@triton.jit
def enough_floor(sums_ptr, numbers_ptr, row, num_tiles, top_k, top_p, vocab_size, TILES: tl.constexpr):
    """The highest floor above which lie all tokens that may be kept."""
    floor, tile = tl.arange(0, _NUM_FLOORS), tl.arange(0, TILES)
    at = row * _NUM_FLOORS * num_tiles + floor[:, None] * num_tiles + tile[None, :]
    inside = (tile < num_tiles)[None, :]
    if top_k < vocab_size:
        enough = tl.sum(tl.load(numbers_ptr + at, mask=inside, other=0), axis=1) >= top_k
    else:
        weights = tl.sum(tl.load(sums_ptr + at, mask=inside, other=0), axis=1)
        enough = (weights >= _needed(top_p, tl.max(weights, axis=0))) & (top_p >= 0)
    return tl.min(tl.where(enough, floor, _NUM_FLOORS - 1), axis=0)


@triton.jit
def _compact_kernel(
    logits_ptr, slots_ptr, table_ptr, floats_ptr, best_ptr, sums_ptr, numbers_ptr, listed_ptr, ids_ptr, row_stride,
    num_tiles, max_num_seqs, vocab_size, MAX_LISTED: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """listed float32, ids int32 [R, MAX_LISTED]: logits above the row's floor in the vocabulary's order."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = line_of(slots_ptr, row, max_num_seqs)
    inverse, top_k, top_p, least, truncated = row_params(table_ptr, floats_ptr, line, vocab_size)
    if (inverse > 0) & truncated:
        floor = enough_floor(sums_ptr, numbers_ptr, row, num_tiles, top_k, top_p, vocab_size, TILES)
        other = tl.arange(0, TILES)
        numbers = numbers_ptr + row * _NUM_FLOORS * num_tiles + floor * num_tiles + other
        first = tl.sum(tl.load(numbers, mask=other < tile, other=0), axis=0)
        maximum = key_logit(row_best(best_ptr, row, num_tiles, TILES))
        x = tl.load(logits_ptr + row * row_stride + column, mask=column < vocab_size, other=float("-inf"))
        above = weight(x, maximum, inverse) >= tl.maximum(floor_weight(floor), least)
        place = first + tl.cumsum(above.to(tl.int32), axis=0) - 1
        written = above & (place < MAX_LISTED)
        tl.store(listed_ptr + row * MAX_LISTED + place, x, mask=written)
        tl.store(ids_ptr + row * MAX_LISTED + place, column, mask=written)


@triton.jit
def _load(x_ptr, begin, count, maximum, inverse, least, order, TILE: tl.constexpr):
    """A tile's indices, orders and weights; these are zero below `least` and below `order` (as of order_of)."""
    at = begin + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < count, other=float("-inf"))
    w = weight(x, maximum, inverse)
    place = order_of(x)
    return at, place, tl.where((w >= least) & (place >= order), w, 0)


@triton.jit
def measure(x_ptr, count, maximum, inverse, least, order, TILE: tl.constexpr):
    """Of what is kept: how much it weighs, how many it is, its lowest order."""
    total, number = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int32)
    lowest = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    for begin in range(0, count, TILE):
        _at, place, w = _load(x_ptr, begin, count, maximum, inverse, least, order, TILE)
        total += w
        number += (w > 0).to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(w > 0, place, 0x7FFFFFFF))
    return tl.sum(total, axis=0), tl.sum(number, axis=0), tl.min(lowest, axis=0)


@triton.jit
def _weight_key(w):
    """int32 in the order of weights, exact: they have 24 digits."""
    return w.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _search(
    x_ptr, count, maximum, inverse, least, order, lowest, beyond, needed, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest key in lowest..beyond - 1 such that what is kept at or above it weighs (or, in number, is) `needed`.

    A quarter of the range is left by each round. Keys are weights' or orders; at `lowest` there is enough.
    """
    lowest, beyond = lowest.to(tl.int64), beyond.to(tl.int64)
    while beyond - lowest > 1:
        step = (beyond - lowest + 3) >> 2
        sum1, sum2, sum3 = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
        for begin in range(0, count, TILE):
            _at, key, w = _load(x_ptr, begin, count, maximum, inverse, least, order, TILE)
            amount = (w > 0).to(tl.int64)
            if BY_WEIGHT:
                key, amount = _weight_key(w), w
            sum1 += tl.where(key >= lowest + step, amount, 0)
            sum2 += tl.where(key >= lowest + 2 * step, amount, 0)
            sum3 += tl.where(key >= lowest + 3 * step, amount, 0)
        rounds = (tl.sum(sum1, axis=0) >= needed).to(tl.int64)
        rounds += (tl.sum(sum2, axis=0) >= needed).to(tl.int64) + (tl.sum(sum3, axis=0) >= needed).to(tl.int64)
        lowest += rounds * step
        beyond = tl.minimum(lowest + step, beyond)
    return lowest


@triton.jit
def thresholds(x_ptr, count, maximum, inverse, top_k, top_p, least, total, vocab_size, TILE: tl.constexpr):
    """Least order and least weight of what is kept; `total` is the row's weight where there is no top_k."""
    order = (count * 0).to(tl.int64) - 2147483648
    if top_k < vocab_size:
        total, number, lowest = measure(x_ptr, count, maximum, inverse, least, order, TILE)
        if number > top_k:
            beyond = order_of(maximum).to(tl.int64) + 1
            order = _search(x_ptr, count, maximum, inverse, least, order, lowest, beyond, top_k, False, TILE)
            total, _, _ = measure(x_ptr, count, maximum, inverse, least, order, TILE)
    if top_p >= 0:
        needed, beyond = _needed(top_p, total), _weight_key(total * 0 + _MOST) + 1
        lowest = _weight_key(least)
        key = _search(x_ptr, count, maximum, inverse, least, order, lowest, beyond, needed, True, TILE)
        least = key.to(tl.int32).to(tl.float32, bitcast=True).to(tl.int64)
    return order, least


@triton.jit
def _walk(x_ptr, count, maximum, inverse, order, least, high, low, TILE: tl.constexpr):
    """Index of the logit drawn from those kept; _NO_ID where nothing has a weight."""
    total, _number, _lowest = measure(x_ptr, count, maximum, inverse, least, order, TILE)
    target = scale_bits(high, low, total)
    before = target * 0
    found = count * 0 + _NO_ID
    for begin in range(0, count, TILE):
        at, _place, w = _load(x_ptr, begin, count, maximum, inverse, least, order, TILE)
        found = tl.minimum(found, tl.min(tl.where(before + tl.cumsum(w, axis=0) > target, at, _NO_ID), axis=0))
        before += tl.sum(w, axis=0)
    return found


@triton.jit
def _draw_truncated(
    logits_ptr, sums_ptr, numbers_ptr, listed_ptr, ids_ptr, row, maximum, inverse, top_k, top_p, least, high, low,
    num_tiles, vocab_size, MAX_LISTED: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """logits_ptr is the row's. The id drawn, or _NO_ID."""
    floor = enough_floor(sums_ptr, numbers_ptr, row, num_tiles, top_k, top_p, vocab_size, TILES)
    tile = tl.arange(0, TILES)
    of_row = row * _NUM_FLOORS * num_tiles + tile
    count = tl.sum(tl.load(numbers_ptr + of_row + floor * num_tiles, mask=tile < num_tiles, other=0), axis=0)
    last = sums_ptr + of_row + (_NUM_FLOORS - 1) * num_tiles
    total = tl.sum(tl.load(last, mask=tile < num_tiles, other=0), axis=0)
    least = tl.maximum(least, floor_weight(floor))
    listed = count <= MAX_LISTED
    x_ptr = logits_ptr
    if listed:
        x_ptr = listed_ptr + row * MAX_LISTED
    else:
        count = tl.minimum(vocab_size, _NO_ID)
    order, least = thresholds(x_ptr, count, maximum, inverse, top_k, top_p, least, total, vocab_size, TILE)
    index = _walk(x_ptr, count, maximum, inverse, order, least, high, low, TILE)
    if listed & (index < _NO_ID):
        index = tl.load(ids_ptr + row * MAX_LISTED + index)
    return index


@triton.jit
def _draw_whole(
    logits_ptr, sums_ptr, row, maximum, inverse, high, low, num_tiles, vocab_size,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The same of a row that keeps all: first the tile, then the token in it."""
    tile = tl.arange(0, TILES)
    last = sums_ptr + (row * _NUM_FLOORS + _NUM_FLOORS - 1) * num_tiles + tile
    sums = tl.load(last, mask=tile < num_tiles, other=0)
    target = scale_bits(high, low, tl.sum(sums, axis=0))
    passed = (tl.cumsum(sums, axis=0) <= target) & (tile < num_tiles)
    first = tl.sum(passed.to(tl.int32), axis=0) * TILE
    column = first + tl.arange(0, TILE)
    x = tl.load(logits_ptr + column, mask=column < vocab_size, other=float("-inf"))
    reached = tl.cumsum(weight(x, maximum, inverse), axis=0) + tl.sum(tl.where(passed, sums, 0), axis=0)
    return tl.min(tl.where(reached > target, column, _NO_ID), axis=0)


@triton.jit
def _pick_kernel(
    logits_ptr, slots_ptr, positions_ptr, table_ptr, floats_ptr, best_ptr, sums_ptr, numbers_ptr, listed_ptr, ids_ptr,
    tokens_ptr, row_stride, num_tiles, max_num_seqs, vocab_size, RANDOM: tl.constexpr, TRUNCATION: tl.constexpr,
    MAX_LISTED: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key = row_best(best_ptr, row, num_tiles, TILES)
    token = key_id(key)
    if RANDOM:
        line = line_of(slots_ptr, row, max_num_seqs)
        inverse, top_k, top_p, least, truncated = row_params(table_ptr, floats_ptr, line, vocab_size)
        if inverse > 0:
            seed = table_ptr + line * COLUMNS
            position = tl.load(positions_ptr + row)
            high, low = uniform_bits(tl.load(seed + _SEED_LOW), tl.load(seed + _SEED_HIGH), position, _STREAM_TOKEN)
            maximum = key_logit(key)
            drawn = token * 0 + _NO_ID
            if TRUNCATION and truncated:
                drawn = _draw_truncated(
                    logits_ptr + row * row_stride, sums_ptr, numbers_ptr, listed_ptr, ids_ptr, row, maximum, inverse,
                    top_k, top_p, least, high, low, num_tiles, vocab_size, MAX_LISTED, TILES, TILE,
                )  # fmt: skip
            else:
                drawn = _draw_whole(
                    logits_ptr + row * row_stride, sums_ptr, row, maximum, inverse, high, low, num_tiles, vocab_size,
                    TILES, TILE,
                )  # fmt: skip
            token = tl.where(drawn < _NO_ID, drawn, token)
    tl.store(tokens_ptr + row, token)


class Scanned(NamedTuple):
    """What is known of R rows of logits before a token is picked; all but `best` only where steps draw or truncate."""

    best: Tensor  # int64 [R, num_tiles]: the tile's largest key
    sums: Tensor | None = None  # int64 [R, 16, num_tiles]
    numbers: Tensor | None = None  # int32 [R, 16, num_tiles]
    listed: Tensor | None = None  # float32 [R, MAX_LISTED]
    ids: Tensor | None = None  # int32 [R, MAX_LISTED]


def scan(logits: Tensor, state: SamplingSlots, slots: Tensor, needs: Needs, max_listed: int = MAX_LISTED) -> Scanned:
    """All launches but the last, see above; arguments as of `choose`."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    grid = (num_rows, num_tiles)
    shape = {"TILES": next_power_of_2(num_tiles), "TILE": TILE, **pdl(logits), **EXACT}
    best = logits.new_empty(num_rows, num_tiles, dtype=torch.int64)
    best_kernel[grid](logits, best, logits.stride(0), num_tiles, vocab_size, TILE=TILE, **pdl(logits), **EXACT)
    if not needs.random:
        return Scanned(best)
    table = (state.table, state.floats, best)
    sizes = (logits.stride(0), num_tiles, state.max_num_seqs, vocab_size)
    sums = logits.new_empty(num_rows, FLOORS, num_tiles, dtype=torch.int64)
    numbers = sums.new_empty(sums.shape, dtype=torch.int32) if needs.truncation else None
    _sums_kernel[grid](logits, slots, *table, sums, numbers, *sizes, TRUNCATION=needs.truncation, **shape)
    if not needs.truncation:
        return Scanned(best, sums)
    listed = logits.new_empty(num_rows, max_listed)
    ids = logits.new_empty(num_rows, max_listed, dtype=torch.int32)
    compacted = (sums, numbers, listed, ids)
    _compact_kernel[grid](logits, slots, *table, *compacted, *sizes, MAX_LISTED=max_listed, **shape)
    return Scanned(best, *compacted)


def choose(
    logits: Tensor,
    state: SamplingSlots,
    slots: Tensor,
    positions: Tensor,
    needs: Needs,
    *,
    max_listed: int = MAX_LISTED,
) -> Tensor:
    """int32 [R]: a token from each row of adjusted logits, float32 [R, V]; slots, positions int32 [R].

    A row without any weight (not finite) gets its largest logit's token. Scratch: 80 kB a row where steps truncate.
    """
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    scanned = scan(logits, state, slots, needs, max_listed)
    tokens = logits.new_empty(num_rows, dtype=torch.int32)
    _pick_kernel[(num_rows,)](
        logits, slots, positions, state.table, state.floats, *scanned, tokens,
        logits.stride(0), num_tiles, state.max_num_seqs, vocab_size,
        RANDOM=needs.random, TRUNCATION=needs.truncation, MAX_LISTED=max_listed,
        TILES=next_power_of_2(num_tiles), TILE=TILE, **pdl(logits), **EXACT,
    )  # fmt: skip
    return tokens
