"""Decode and verify rows made from the slots' state on the device, and that state moved on: rose.slots in two kernels.

One program a row. A row of nobody's slot, the state's last, only fills up a batch: it has no keys, writes to the dummy
block and changes nothing.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl
from rose.slots import Slots

_BLOCKS = 1024  # entries of a block table copied at a time


class DecodeRows(NamedTuple):
    """Static buffers of R rows with q tokens each, T = R · q; all int32."""

    slots: Tensor  # [R], given: which slot each row is of
    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    cu_seqlens_q: Tensor  # [R + 1]
    kv_lengths: Tensor  # [R]
    block_table: Tensor  # [R, max_blocks]
    num_known: Tensor  # [R]: tokens before this step, the position of the first to come
    num_output: Tensor  # [R]: of them generated


@triton.jit
def _slot_rows_kernel(
    slots_ptr, ids_ptr, num_tokens_ptr, num_computed_ptr, num_prompt_ptr, table_ptr,
    input_ids_ptr, positions_ptr, mapping_ptr, cu_seqlens_ptr, kv_lengths_ptr, row_table_ptr, known_ptr, output_ptr,
    nobody, ids_stride, table_stride, row_table_stride, num_blocks, max_model_len, dummy_block,
    Q: tl.constexpr, QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
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
        block = tl.load(table_ptr + slot * table_stride + index, mask=index < num_own, other=dummy_block)
        tl.store(row_table_ptr + row.to(tl.int64) * row_table_stride + index, block, mask=index < num_blocks)


def slot_rows(slots: Slots, rows: DecodeRows) -> None:
    """Fills everything of `rows` but its slots: each row computes q tokens behind those its slot has computed."""
    num_rows = len(rows.slots)
    num_blocks, q = slots.block_table.shape[1], len(rows.input_ids) // num_rows
    _slot_rows_kernel[(num_rows,)](
        rows.slots, slots.ids, slots.num_tokens, slots.num_computed, slots.num_prompt, slots.block_table,
        rows.input_ids, rows.positions, rows.slot_mapping, rows.cu_seqlens_q, rows.kv_lengths, rows.block_table,
        rows.num_known, rows.num_output,
        len(slots.num_tokens) - 1, slots.ids.stride(0), slots.block_table.stride(0), rows.block_table.stride(0),
        num_blocks, slots.max_model_len, slots.dummy_block,
        Q=q, QUERIES=next_power_of_2(q), BLOCK_SIZE=slots.block_size,
        BLOCKS=min(_BLOCKS, next_power_of_2(num_blocks)), **pdl(rows.slots),
    )  # fmt: skip


@triton.jit
def _advance_kernel(
    slots_ptr, tokens_ptr, num_new_ptr, ids_ptr, num_tokens_ptr, num_computed_ptr, lengths_ptr,
    nobody, ids_stride, tokens_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_row = slot < nobody
    num_new = tl.where(is_row, tl.load(num_new_ptr + row), 0)
    computed = tl.load(num_computed_ptr + slot) + num_new
    known = computed + (num_new > 0).to(tl.int32)
    entry = tl.arange(0, BLOCK)
    place = known - num_new + entry
    token = tl.load(tokens_ptr + row * tokens_stride + entry, mask=entry < WIDTH, other=0)
    kept = (entry < num_new) & (place < ids_stride)
    tl.store(ids_ptr + slot * ids_stride + place, token, mask=kept)
    tl.store(num_computed_ptr + slot, computed, mask=is_row)
    tl.store(num_tokens_ptr + slot, known, mask=is_row)
    tl.store(lengths_ptr + row, tl.where(is_row, known, 0))


def advance_rows(slots: Slots, row_slots: Tensor, tokens: Tensor, num_new: Tensor, lengths: Tensor) -> None:
    """Appends the first num_new[r] (int32 [R]) of tokens[r] (int32 [R, k + 1]) to the slot row_slots[r] (int32 [R]) of
    each decode or verify row; `lengths` int32 [R] gets how many tokens that slot then holds.

    Of the tokens appended all but the last have been computed in this step, and so has the one before them.
    """
    num_rows, width = tokens.shape
    _advance_kernel[(num_rows,)](
        row_slots, tokens, num_new, slots.ids, slots.num_tokens, slots.num_computed, lengths,
        len(slots.num_tokens) - 1, slots.ids.stride(0), tokens.stride(0),
        WIDTH=width, BLOCK=next_power_of_2(width), num_warps=1, **pdl(tokens),
    )  # fmt: skip
