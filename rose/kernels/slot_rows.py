"""Decode and verify rows made from the slots' state on the device; that state moved on, and what is told of it.

What rose.slots does in torch, in one launch before and one after the forward pass, a program a row. A row of nobody's
slot, the state's last, only fills up a batch: it has no keys, writes to the dummy block and changes nothing.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ipc.step import GEN_SLOT, STATUS_NON_FINITE, STATUS_OK
from rose.kernels.launch import next_power_of_2, pdl
from rose.slots import Slots

_BLOCKS = 1024  # entries of a block table copied at a time
_LOGITS = 8192  # looked at by one program
_SLOT, _COLUMNS = tl.constexpr(GEN_SLOT), tl.constexpr(8)  # of a step's rows
_OK, _NON_FINITE = tl.constexpr(STATUS_OK), tl.constexpr(STATUS_NON_FINITE)


class DecodeRows(NamedTuple):
    """Static buffers of R rows with q tokens each, T = R · q; all int32."""

    table: Tensor  # [R, 8], given: a step's rows (columns: ipc.step), of which only the slot is read
    slots: Tensor  # [R]
    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    next_ids: Tensor  # [T]: the draft behind each; 0 behind a row's last
    cu_seqlens_q: Tensor  # [R + 1]
    kv_lengths: Tensor  # [R]
    block_table: Tensor  # [R, max_blocks]
    status: Tensor  # [T]: so far nothing is wrong with any
    place_slots: Tensor  # [T]: of what comes behind each token its row's slot
    place_positions: Tensor  # [T]: its position
    place_outputs: Tensor  # [T]: how many tokens were generated before it, drafts included


class RowOutputs(NamedTuple):
    """What a step answers of its R rows; all int32."""

    status: Tensor  # [R]
    num_tokens: Tensor  # [R]: new ones; none of a row that failed
    tokens: Tensor  # [R, >= q], the first q
    num_drafts: Tensor  # [R]
    lengths: Tensor  # [R]: how many tokens the row's slot holds now


@triton.jit
def _slot_rows_kernel(
    rows_ptr, ids_ptr, num_tokens_ptr, num_computed_ptr, num_prompt_ptr, table_ptr, drafts_ptr, slots_ptr,
    input_ids_ptr, positions_ptr, mapping_ptr, next_ptr, cu_seqlens_ptr, kv_lengths_ptr, row_table_ptr, status_ptr,
    place_slots_ptr, place_positions_ptr, place_outputs_ptr,
    nobody, ids_stride, table_stride, drafts_stride, row_table_stride, num_blocks, max_model_len, dummy_block,
    Q: tl.constexpr, QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows_ptr + row * _COLUMNS + _SLOT)
    tl.store(slots_ptr + row, slot)
    slot = slot.to(tl.int64)
    is_row = slot < nobody
    computed = tl.load(num_computed_ptr + slot)
    known = tl.load(num_tokens_ptr + slot)
    query = tl.arange(0, QUERIES)
    written = query < Q
    place = tl.minimum(computed + query, ids_stride - 1)
    read = query < tl.where(is_row, Q, 0)
    block = tl.load(table_ptr + slot * table_stride + place // BLOCK_SIZE, mask=read, other=dummy_block)
    token = row * Q + query
    last = tl.load(ids_ptr + slot * ids_stride + place, mask=read & (query == 0), other=0)
    draft = drafts_ptr + row.to(tl.int64) * drafts_stride + query
    ids = tl.where(query == 0, last, tl.load(draft - 1, mask=read & (query > 0), other=0))
    tl.store(input_ids_ptr + token, ids, mask=written)
    tl.store(positions_ptr + token, tl.where(is_row, tl.minimum(place, max_model_len - 1), 0), mask=written)
    tl.store(mapping_ptr + token, block * BLOCK_SIZE + place % BLOCK_SIZE, mask=written)
    tl.store(next_ptr + token, tl.load(draft, mask=read & (query < Q - 1), other=0), mask=written)
    tl.store(cu_seqlens_ptr + row + 1, (row + 1) * Q)
    if row == 0:
        tl.store(cu_seqlens_ptr, 0)
    tl.store(kv_lengths_ptr + row, tl.where(is_row, tl.minimum(computed + Q, ids_stride), 0))
    output = known - tl.load(num_prompt_ptr + slot)
    tl.store(status_ptr + token, query * 0 + _OK, mask=written)
    tl.store(place_slots_ptr + token, (slot + query * 0).to(tl.int32), mask=written)
    tl.store(place_positions_ptr + token, tl.where(is_row, known + query, 0), mask=written)
    tl.store(place_outputs_ptr + token, tl.where(is_row, output + query, 0), mask=written)
    num_own = tl.where(is_row, num_blocks, 0)
    for begin in range(0, num_blocks, BLOCKS):
        index = begin + tl.arange(0, BLOCKS)
        entry = tl.load(table_ptr + slot * table_stride + index, mask=index < num_own, other=dummy_block)
        tl.store(row_table_ptr + row.to(tl.int64) * row_table_stride + index, entry, mask=index < num_blocks)


def slot_rows(slots: Slots, rows: DecodeRows, drafts: Tensor | None = None) -> None:
    """Fills everything of `rows` but its table: each row computes the last token that its slot knows and, of q > 1
    tokens, its drafts, int32 [R, q - 1]."""
    num_rows = len(rows.slots)
    num_blocks, q = slots.block_table.shape[1], len(rows.input_ids) // num_rows
    assert q == 1 or (drafts is not None and drafts.shape == (num_rows, q - 1)), "a draft for every further token"
    drafts = rows.slots[:, None] if drafts is None or q == 1 else drafts  # of one token nothing is read
    assert drafts.stride(1) == 1, "drafts of a row must follow each other"
    _slot_rows_kernel[(num_rows,)](
        rows.table, slots.ids, slots.num_tokens, slots.num_computed, slots.num_prompt, slots.block_table, drafts,
        *rows[1:],
        len(slots.num_tokens) - 1, slots.ids.stride(0), slots.block_table.stride(0), drafts.stride(0),
        rows.block_table.stride(0), num_blocks, slots.max_model_len, slots.dummy_block,
        Q=q, QUERIES=next_power_of_2(q), BLOCK_SIZE=slots.block_size,
        BLOCKS=min(_BLOCKS, next_power_of_2(num_blocks)), **pdl(rows.slots),
    )  # fmt: skip


@triton.jit
def _mark_kernel(logits_ptr, status_ptr, row_stride, vocab_size, LOGITS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    token = tl.program_id(1) * LOGITS + tl.arange(0, LOGITS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.load(logits_ptr + row.to(tl.int64) * row_stride + token, mask=token < vocab_size, other=0.0)
    finite = tl.abs(logits) < float("inf")  # false for NaN
    if tl.min(finite.to(tl.int32), axis=0) == 0:
        tl.store(status_ptr + row, _NON_FINITE)


def mark_non_finite(logits: Tensor, status: Tensor) -> None:
    """status int32 [T] becomes STATUS_NON_FINITE where logits [T, V] are not all finite, and stays otherwise."""
    num_rows, vocab_size = logits.shape
    _mark_kernel[(num_rows, triton.cdiv(vocab_size, _LOGITS))](
        logits, status, logits.stride(0), vocab_size, LOGITS=min(_LOGITS, next_power_of_2(vocab_size)), **pdl(logits)
    )


@triton.jit
def _advance_kernel(
    slots_ptr, status_ptr, tokens_ptr, num_new_ptr, drafts_ptr, ids_ptr, num_tokens_ptr, num_computed_ptr,
    status_out_ptr, count_out_ptr, tokens_out_ptr, drafts_out_ptr, lengths_out_ptr,
    nobody, ids_stride, out_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_row = slot < nobody
    num_new = tl.where(is_row, tl.load(num_new_ptr + row), 0)
    entry = tl.arange(0, BLOCK)
    status = tl.max(tl.load(status_ptr + row * WIDTH + entry, mask=entry < num_new, other=_OK), axis=0)
    computed = tl.load(num_computed_ptr + slot) + num_new
    known = computed + (num_new > 0).to(tl.int32)
    place = known - num_new + entry
    token = tl.load(tokens_ptr + row * WIDTH + entry, mask=entry < WIDTH, other=0)
    tl.store(ids_ptr + slot * ids_stride + place, token, mask=(entry < num_new) & (place < ids_stride))
    tl.store(num_computed_ptr + slot, computed, mask=is_row)
    tl.store(num_tokens_ptr + slot, known, mask=is_row)
    tl.store(status_out_ptr + row, status)
    tl.store(count_out_ptr + row, tl.where(status == _OK, num_new, 0))
    tl.store(tokens_out_ptr + row * out_stride + entry, token, mask=entry < WIDTH)
    tl.store(drafts_out_ptr + row, tl.load(drafts_ptr + row))
    tl.store(lengths_out_ptr + row, tl.where(is_row, known, 0))


def advance_rows(
    slots: Slots, rows: DecodeRows, tokens: Tensor, num_new: Tensor, num_drafts: Tensor, out: RowOutputs
) -> None:
    """Appends the first num_new[r] (int32 [R], at most q) of tokens[r] (int32 [R, q]) to each row's slot, and tells
    `out`, with num_drafts (int32 [R]) as they are.

    Of the tokens appended all but the last have been computed in this step, and so has the one before them. A row fails
    with the status of a place that gave a token, if any has one. It goes on like others: its sequence ends.
    """
    num_rows, width = tokens.shape
    assert len(rows.status) == num_rows * width, "a status for each token"
    assert all(each.is_contiguous() for each in (tokens, num_new, num_drafts)), "read as dense"
    _advance_kernel[(num_rows,)](
        rows.slots, rows.status, tokens, num_new, num_drafts, slots.ids, slots.num_tokens, slots.num_computed, *out,
        len(slots.num_tokens) - 1, slots.ids.stride(0), out.tokens.stride(0),
        WIDTH=width, BLOCK=next_power_of_2(width), num_warps=1, **pdl(tokens),
    )  # fmt: skip
