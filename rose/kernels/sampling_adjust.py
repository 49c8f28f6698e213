"""Biases, masks and penalties on logits in place, and the counts that penalties need.

See rose/sampling/reference.py for what they are; what is sparse (logit_bias, min_tokens) is one program a row, what is
dense (penalties, a grammar's mask) one a tile of a row.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import pdl
from rose.kernels.sampling_math import COLUMNS, EXACT, TILE, line_of
from rose.sampling import params
from rose.sampling.reference import MASKED
from rose.sampling.slots import COUNT_LIMIT, COUNT_MASK, IN_PROMPT, SamplingSlots

_FLAGS, _MIN_TOKENS = tl.constexpr(params.FLAGS), tl.constexpr(params.MIN_TOKENS)
_NUM_BIASES, _NUM_STOPS = tl.constexpr(params.NUM_BIASES), tl.constexpr(params.NUM_STOPS)
_REPETITION, _INVERSE = tl.constexpr(params.REPETITION), tl.constexpr(params.INVERSE_REPETITION)
_FREQUENCY, _PRESENCE = tl.constexpr(params.FREQUENCY), tl.constexpr(params.PRESENCE)
_HAS_PENALTIES = tl.constexpr(params.HAS_PENALTIES)
_MAX_BIASES, _MAX_STOPS = tl.constexpr(params.MAX_BIASES), tl.constexpr(params.MAX_STOPS)
_MASKED = tl.constexpr(MASKED)
_COUNT_MASK, _COUNT_LIMIT = tl.constexpr(COUNT_MASK), tl.constexpr(COUNT_LIMIT)
_IN_PROMPT = tl.constexpr(-IN_PROMPT)  # as an unsigned half of a word
_TOKENS = 128  # counted by one program


@triton.jit
def _edit_kernel(
    logits_ptr, slots_ptr, num_output_ptr, table_ptr, bias_ids_ptr, bias_values_ptr, stop_ids_ptr, row_stride,
    max_num_seqs, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = line_of(slots_ptr, row, max_num_seqs)
    logits_ptr += row.to(tl.int64) * row_stride
    entry = tl.arange(0, _MAX_BIASES)
    present = entry < tl.load(table_ptr + line * COLUMNS + _NUM_BIASES)
    at = logits_ptr + tl.load(bias_ids_ptr + line * _MAX_BIASES + entry, mask=present, other=0)
    bias = tl.load(bias_values_ptr + line * _MAX_BIASES + entry, mask=present, other=0.0)
    tl.store(at, tl.load(at, mask=present, other=0.0) + bias, mask=present)
    tl.debug_barrier()  # a token may stand in both lists
    stop = tl.arange(0, _MAX_STOPS)
    early = tl.load(num_output_ptr + row) < tl.load(table_ptr + line * COLUMNS + _MIN_TOKENS)
    masked = stop < tl.where(early, tl.load(table_ptr + line * COLUMNS + _NUM_STOPS), 0)
    at = logits_ptr + tl.load(stop_ids_ptr + line * _MAX_STOPS + stop, mask=masked, other=0)
    tl.store(at, tl.full((_MAX_STOPS,), _MASKED, tl.float32), mask=masked)


@triton.jit
def _adjust_kernel(
    logits_ptr, slots_ptr, table_ptr, floats_ptr, counts_ptr, bitmask_ptr, before_ptr, row_stride, counts_stride,
    mask_stride, max_num_seqs, vocab_size, PENALTIES: tl.constexpr, MASK: tl.constexpr, BEFORE: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < vocab_size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = line_of(slots_ptr, row, max_num_seqs)
    counted = (tl.load(table_ptr + line * COLUMNS + _FLAGS) & _HAS_PENALTIES) != 0
    if MASK or (PENALTIES and counted):
        at = logits_ptr + row * row_stride + column
        x = tl.load(at, mask=inside, other=0.0)
        if PENALTIES:  # all zeros change nothing
            floats = floats_ptr + line * COLUMNS
            present = column < tl.where(counted, vocab_size, 0)
            seen = tl.load(counts_ptr + line * counts_stride + column, mask=present, other=0).to(tl.int32)
            for index in tl.static_range(BEFORE):  # -1 is no column
                earlier = tl.load(before_ptr + row * BEFORE + index)
                seen += ((column == earlier) & present).to(tl.int32)
            repeated = tl.where(x > 0, x * tl.load(floats + _INVERSE), x * tl.load(floats + _REPETITION))
            x = tl.where(seen != 0, repeated, x)
            count = (seen & _COUNT_MASK).to(tl.float32)
            x = x - tl.load(floats + _FREQUENCY) * count
            x = x - tl.load(floats + _PRESENCE) * (count > 0).to(tl.float32)
        if MASK:
            word = tl.load(bitmask_ptr + row * mask_stride + column // 32, mask=inside, other=-1)
            x = tl.where(((word >> (column % 32)) & 1) != 0, x, float("-inf"))
        tl.store(at, x, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _count_kernel(
    slots_ptr, ids_ptr, is_output_ptr, table_ptr, pairs_ptr, num_tokens, pairs_stride, max_num_seqs,
    OUTPUT: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + token, mask=inside, other=-1)
    line = tl.where((slot < 0) | (slot > max_num_seqs), max_num_seqs, slot).to(tl.int64)
    flags = tl.load(table_ptr + line * COLUMNS + _FLAGS, mask=inside, other=0)
    counted = inside & ((flags & _HAS_PENALTIES) != 0)
    id = tl.load(ids_ptr + token, mask=counted, other=0)
    shift = (id & 1) * 16
    at = pairs_ptr + line * pairs_stride + (id >> 1)
    output = counted
    if not OUTPUT:
        is_output = tl.load(is_output_ptr + token, mask=counted, other=0) != 0
        tl.atomic_or(at, (shift * 0 + _IN_PROMPT) << shift, mask=counted & (is_output == 0))
        output = counted & is_output
    room = ((tl.load(at, mask=output, other=0) >> shift) & _COUNT_MASK) < _COUNT_LIMIT
    tl.atomic_add(at, (shift * 0 + 1) << shift, mask=output & room)


def edit(logits: Tensor, state: SamplingSlots, slots: Tensor, num_output: Tensor) -> None:
    """logit_bias, then min_tokens: logits float32 [R, V] in place, slots, num_output int32 [R]."""
    _edit_kernel[(len(logits),)](
        logits, slots, num_output, state.table, state.bias_ids, state.bias_values, state.stop_ids, logits.stride(0),
        state.max_num_seqs, **pdl(logits), **EXACT,
    )  # fmt: skip


def penalise_and_mask(
    logits: Tensor,
    state: SamplingSlots,
    slots: Tensor,
    bitmask: Tensor | None,
    before: Tensor | None = None,
    *,
    penalties: bool,
) -> None:
    """Penalties, then a grammar's mask (int32 [R, ceil(V / 32)]): logits float32 [R, V] in place, slots int32 [R];
    before int32 [R, k], contiguous: output that counts do not hold yet, negative where there is none."""
    num_rows, vocab_size = logits.shape
    counts = state.counts if penalties else None
    _adjust_kernel[(num_rows, triton.cdiv(vocab_size, TILE))](
        logits, slots, state.table, state.floats, counts, bitmask, before, logits.stride(0),
        0 if counts is None else counts.stride(0), 0 if bitmask is None else bitmask.stride(0),
        state.max_num_seqs, vocab_size, PENALTIES=counts is not None, MASK=bitmask is not None,
        BEFORE=0 if before is None else before.shape[1], TILE=TILE,
        **pdl(logits), **EXACT,
    )  # fmt: skip


def count_tokens(state: SamplingSlots, slots: Tensor, ids: Tensor, is_output: Tensor | None) -> None:
    """Adds tokens to the counts of slots that have penalties. All int32 [T]; without is_output all are output."""
    assert state.counts is not None, "no slot has penalties"
    pairs = state.counts.view(slots.dtype)
    num_tokens = len(slots)
    _count_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        slots, ids, is_output, state.table, pairs, num_tokens, pairs.stride(0), state.max_num_seqs,
        OUTPUT=is_output is None, TOKENS=_TOKENS, num_warps=4, **pdl(slots),
    )  # fmt: skip
