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
    status: Tensor  # [R]: so far nothing is wrong with any
    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    cu_seqlens_q: Tensor  # [R + 1]
    kv_lengths: Tensor  # [R]
    block_table: Tensor  # [R, max_blocks]
    num_known: Tensor  # [R]: tokens before this step, the position of the first to come
    num_output: Tensor  # [R]: of them generated


class RowOutputs(NamedTuple):
    """What a step answers of its R rows; all int32."""

    status: Tensor  # [R]
    num_tokens: Tensor  # [R]: new ones; none of a row that failed
    tokens: Tensor  # [R, k + 1]
    num_drafts: Tensor  # [R]
    lengths: Tensor  # [R]: how many tokens the row's slot holds now


@triton.jit
def _slot_rows_kernel(
    rows_ptr, ids_ptr, num_tokens_ptr, num_computed_ptr, num_prompt_ptr, table_ptr, slots_ptr, status_ptr,
    input_ids_ptr, positions_ptr, mapping_ptr, cu_seqlens_ptr, kv_lengths_ptr, row_table_ptr, known_ptr, output_ptr,
    nobody, ids_stride, table_stride, row_table_stride, num_blocks, max_model_len, dummy_block,
    Q: tl.constexpr, QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows_ptr + row * _COLUMNS + _SLOT)
    tl.store(slots_ptr + row, slot)
    tl.store(status_ptr + row, _OK)
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
    tl.store(input_ids_ptr + token, tl.load(ids_ptr + slot * ids_stride + place, mask=read, other=0), mask=written)
    tl.store(positions_ptr + token, tl.where(is_row, tl.minimum(place, max_model_len - 1), 0), mask=written)
    tl.store(mapping_ptr + token, block * BLOCK_SIZE + place % BLOCK_SIZE, mask=written)
    tl.store(cu_seqlens_ptr + row + 1, (row + 1) * Q)
    if row == 0:
        tl.store(cu_seqlens_ptr, 0)
    tl.store(kv_lengths_ptr + row, tl.where(is_row, tl.minimum(computed + Q, ids_stride), 0))
    tl.store(known_ptr + row, tl.where(is_row, known, 0))
    tl.store(output_ptr + row, tl.where(is_row, known - tl.load(num_prompt_ptr + slot), 0))
    num_own = tl.where(is_row, num_blocks, 0)
    for begin in range(0, num_blocks, BLOCKS):
        index = begin + tl.arange(0, BLOCKS)
        entry = tl.load(table_ptr + slot * table_stride + index, mask=index < num_own, other=dummy_block)
        tl.store(row_table_ptr + row.to(tl.int64) * row_table_stride + index, entry, mask=index < num_blocks)


def slot_rows(slots: Slots, rows: DecodeRows) -> None:
    """Fills everything of `rows` but its table: each row computes q tokens behind those its slot has computed."""
    num_rows = len(rows.slots)
    num_blocks, q = slots.block_table.shape[1], len(rows.input_ids) // num_rows
    _slot_rows_kernel[(num_rows,)](
        rows.table, slots.ids, slots.num_tokens, slots.num_computed, slots.num_prompt, slots.block_table,
        rows.slots, rows.status, rows.input_ids, rows.positions, rows.slot_mapping, rows.cu_seqlens_q,
        rows.kv_lengths, rows.block_table,
        rows.num_known, rows.num_output,
        len(slots.num_tokens) - 1, slots.ids.stride(0), slots.block_table.stride(0), rows.block_table.stride(0),
        num_blocks, slots.max_model_len, slots.dummy_block,
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
    """status int32 [R] becomes STATUS_NON_FINITE where logits [R, V] are not all finite, and stays otherwise."""
    num_rows, vocab_size = logits.shape
    _mark_kernel[(num_rows, triton.cdiv(vocab_size, _LOGITS))](
        logits, status, logits.stride(0), vocab_size, LOGITS=min(_LOGITS, next_power_of_2(vocab_size)), **pdl(logits)
    )


@triton.jit
def _advance_kernel(
    slots_ptr, status_ptr, tokens_ptr, num_new_ptr, ids_ptr, num_tokens_ptr, num_computed_ptr,
    status_out_ptr, count_out_ptr, tokens_out_ptr, drafts_out_ptr, lengths_out_ptr,
    nobody, ids_stride, num_drafts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_row = slot < nobody
    status = tl.load(status_ptr + row)
    num_new = tl.where(is_row, tl.load(num_new_ptr + row), 0)
    computed = tl.load(num_computed_ptr + slot) + num_new
    known = computed + (num_new > 0).to(tl.int32)
    entry = tl.arange(0, BLOCK)
    place = known - num_new + entry
    token = tl.load(tokens_ptr + row * WIDTH + entry, mask=entry < WIDTH, other=0)
    tl.store(ids_ptr + slot * ids_stride + place, token, mask=(entry < num_new) & (place < ids_stride))
    tl.store(num_computed_ptr + slot, computed, mask=is_row)
    tl.store(num_tokens_ptr + slot, known, mask=is_row)
    tl.store(status_out_ptr + row, status)
    tl.store(count_out_ptr + row, tl.where(status == _OK, num_new, 0))
    tl.store(tokens_out_ptr + row * WIDTH + entry, token, mask=entry < WIDTH)
    tl.store(drafts_out_ptr + row, num_drafts)
    tl.store(lengths_out_ptr + row, tl.where(is_row, known, 0))


def advance_rows(slots: Slots, rows: DecodeRows, tokens: Tensor, num_new: Tensor, out: RowOutputs) -> None:
    """Appends the first num_new[r] (int32 [R]) of tokens[r] (int32 [R, k + 1]) to each row's slot, and tells `out`.

    Of the tokens appended all but the last have been computed in this step, and so has the one before them. Rows that
    failed go on like others: their sequences end.
    """
    num_rows, width = tokens.shape
    assert tokens.is_contiguous(), "tokens of a row must follow each other"
    _advance_kernel[(num_rows,)](
        rows.slots, rows.status, tokens, num_new, slots.ids, slots.num_tokens, slots.num_computed, *out,
        len(slots.num_tokens) - 1, slots.ids.stride(0), len(rows.input_ids) // num_rows - 1,
        WIDTH=width, BLOCK=next_power_of_2(width), num_warps=1, **pdl(tokens),
    )  # fmt: skip
