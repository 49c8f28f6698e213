"""Acceptance as kernels, a program a row: rose/speculation/accept.py, bit for bit.

Static shapes, nothing waits for the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl
from rose.kernels.sampling_math import EXACT, TILE, scale_bits, uniform_bits
from rose.sampling.distribution import WEIGHT_BITS
from rose.sampling.philox import STREAM_ACCEPT, STREAM_RESAMPLE, STREAM_TOKEN

_ACCEPT, _RESAMPLE = tl.constexpr(STREAM_ACCEPT), tl.constexpr(STREAM_RESAMPLE)
_TOKEN = tl.constexpr(STREAM_TOKEN)
_UNIT = tl.constexpr(2.0**WEIGHT_BITS)
_NO_ID = tl.constexpr(0x7FFFFFFF)


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
def _left(w_ptr, q_ptr, column, vocab_size, total, residual):
    """A tile's weights, int64: what p has more than q where `residual`, else p's."""
    w = tl.load(w_ptr + column, mask=column < vocab_size, other=0)
    if residual:
        q = tl.load(q_ptr + column, mask=column < vocab_size, other=0.0).to(tl.float64)
        more = w.to(tl.float64) / total.to(tl.float64) - q
        w = (tl.where(more > 0, more, 0.0) * _UNIT).to(tl.int64)
    return w


@triton.jit
def _total(w_ptr, q_ptr, vocab_size, total, residual, TILE: tl.constexpr):
    found = tl.zeros((TILE,), tl.int64)
    for begin in range(0, vocab_size, TILE):
        found += _left(w_ptr, q_ptr, begin + tl.arange(0, TILE), vocab_size, total, residual)
    return tl.sum(found, axis=0)


@triton.jit
def _accept_drawn_kernel(
    weights_ptr, seeds_ptr, positions_ptr, starts_ptr, drafts_ptr, counts_ptr, probabilities_ptr, tokens_ptr,
    num_new_ptr, weights_stride, drafts_stride, q_row_stride, q_stride, k, vocab_size,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts_ptr + row).to(tl.int64)
    count = tl.load(counts_ptr + row)
    none = start * 0
    num_accepted = count * 0
    going = count * 0 + 1
    total = none
    for index in range(count + 1):
        if going != 0:
            w_ptr = weights_ptr + (start + index) * weights_stride
            total = _total(w_ptr, probabilities_ptr, vocab_size, none, 0, TILE)
            going = going * 0
            if index < count:
                draft = tl.load(drafts_ptr + row * drafts_stride + index)
                p = tl.load(w_ptr + draft).to(tl.float64) / total.to(tl.float64)
                q = tl.load(probabilities_ptr + row * q_row_stride + index * q_stride + draft).to(tl.float64)
                seed = seeds_ptr + (start + index) * 2
                position = tl.load(positions_ptr + start + index)
                high, low = uniform_bits(tl.load(seed), tl.load(seed + 1), position, _ACCEPT)
                chance = (high.to(tl.float64) * 2147483648.0 + low.to(tl.float64)) * 2.168404344971009e-19
                if chance * q < p:
                    going = going + 1
                    num_accepted = num_accepted + 1
                    tl.store(tokens_ptr + row * (k + 1) + index, draft)
    place = start + num_accepted
    w_ptr = weights_ptr + place * weights_stride
    q_ptr = probabilities_ptr + row * q_row_stride + tl.minimum(num_accepted, k - 1) * q_stride
    residual = (num_accepted < count).to(tl.int32)
    left = total
    if residual != 0:
        left = _total(w_ptr, q_ptr, vocab_size, total, 1, TILE)
        if left == 0:
            residual = residual * 0
            left = total
    seed, position = seeds_ptr + place * 2, tl.load(positions_ptr + place)
    stream = tl.where(residual != 0, _RESAMPLE, _TOKEN)
    high, low = uniform_bits(tl.load(seed), tl.load(seed + 1), position, stream)
    target = scale_bits(high, low, left)
    before, token = none, num_accepted * 0 + _NO_ID
    for begin in range(0, vocab_size, TILE):
        column = begin + tl.arange(0, TILE)
        w = _left(w_ptr, q_ptr, column, vocab_size, total, residual)
        token = tl.minimum(token, tl.min(tl.where(before + tl.cumsum(w, axis=0) > target, column, _NO_ID), axis=0))
        before += tl.sum(w, axis=0)
    tl.store(tokens_ptr + row * (k + 1) + num_accepted, token)
    tl.store(num_new_ptr + row, num_accepted + 1)


def accept_drawn(
    weights: Tensor,
    seeds: Tensor,
    positions: Tensor,
    starts: Tensor,
    drafts: Tensor,
    counts: Tensor,
    probabilities: Tensor,
) -> tuple[Tensor, Tensor]:
    """See rose.speculation.accept.accept_drawn: weights int64 [N, V], seeds int32 [N, 2], positions int32 [N], starts
    int32 [R + 1], drafts int32 [R, k], counts int32 [R], probabilities float32 [R, k, V], the last dimension of each
    contiguous -> tokens int32 [R, k + 1], num_new int32 [R]."""
    num_rows, k = drafts.shape
    assert all(each.is_contiguous() for each in (positions, starts, counts)), "read as dense"
    assert all(each.stride(-1) == 1 for each in (weights, drafts, probabilities)), "rows are read as dense"
    tokens, num_new = drafts.new_zeros(num_rows, k + 1), torch.empty_like(counts)
    _accept_drawn_kernel[(num_rows,)](
        weights, seeds.contiguous(), positions, starts, drafts, counts, probabilities, tokens, num_new,
        weights.stride(0), drafts.stride(0), probabilities.stride(0), probabilities.stride(1), k, weights.shape[1],
        TILE=TILE, **pdl(weights), **EXACT,
    )  # fmt: skip
    return tokens, num_new
