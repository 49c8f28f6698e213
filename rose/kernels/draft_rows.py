"""What proposers know of rows before and after their passes: rose/speculation/{passes,kept_blocks}.py, a launch each.

A program a row; static shapes, nothing waits for the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl
from rose.slots import RowInputs, Slots

_BLOCKS = 1024  # entries of a block table looked at at a time
_TOKENS = 128  # of a row, whose blocks are marked at a time
_LACKS_LAST = tl.constexpr(2)  # of a block, as in rose.speculation.passes; 1: it is whole, 0: it has a gap
_SIZE = 4096  # values of a hidden state copied at a time


@triton.jit
def _covered(
    whole_ptr, table_ptr, length, covered, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """`covered`, or 0 where a block of the first `length` positions has a gap, but at the very last; table_ptr is the
    row's."""
    num_blocks = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    for begin in range(0, num_blocks, BLOCKS):
        index = begin + tl.arange(0, BLOCKS)
        block = tl.load(table_ptr + index, mask=index < num_blocks, other=0)
        whole = tl.load(whole_ptr + block, mask=index < num_blocks, other=1)
        fine = (whole == 1) | ((whole == _LACKS_LAST) & ((index + 1) * BLOCK_SIZE == length))
        covered = tl.minimum(covered, tl.min(fine.to(tl.int32), axis=0))
    return covered


@triton.jit(do_not_specialize=["num_rows"])
def _places_kernel(
    slots_ptr, limits_ptr, ids_ptr, num_tokens_ptr, num_prompt_ptr, table_ptr, whole_ptr, places_ptr, per_row_ptr,
    row_table_ptr, cu_seqlens_ptr, pairs_ptr, num_rows, num_passes, ids_stride, table_stride, num_blocks,
    max_model_len, dummy,
    WHOLE: tl.constexpr, PAIRS: tl.constexpr, PASSES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """places int32 [5, P, R], per_row int32 [2, R]: the fields of RowPlaces in their order; pairs int32 [3, R, 2]:
    those of Pairs; cu_seqlens int32 [R + 1], with pairs [2, R + 1]."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    table_ptr += slot * table_stride
    ids_ptr += slot * ids_stride
    known = tl.load(num_tokens_ptr + slot)
    ahead = tl.arange(0, PASSES)
    place = tl.minimum(tl.maximum(known - 1 + ahead, 0), ids_stride - 1)
    block = tl.load(table_ptr + place // BLOCK_SIZE)
    field, inside = num_passes * num_rows, ahead < num_passes
    at = places_ptr + ahead * num_rows + row
    tl.store(at, tl.minimum(place, max_model_len - 1), mask=inside)
    tl.store(at + field, place + 1, mask=inside)
    tl.store(at + 2 * field, block * BLOCK_SIZE + place % BLOCK_SIZE, mask=inside)
    tl.store(at + 3 * field, known + ahead, mask=inside)
    tl.store(at + 4 * field, known - tl.load(num_prompt_ptr + slot) + ahead, mask=inside)
    if PAIRS:
        two = tl.arange(0, 2)
        place = tl.minimum(tl.maximum(known - 2 + two, 0), ids_stride - 1)
        block = tl.where(two >= 2 - known, tl.load(table_ptr + place // BLOCK_SIZE), dummy)
        at = pairs_ptr + 2 * row + two
        tl.store(at, tl.load(ids_ptr + place))
        tl.store(at + 2 * num_rows, tl.minimum(place, max_model_len - 1))
        tl.store(at + 4 * num_rows, block * BLOCK_SIZE + place % BLOCK_SIZE)
        tl.store(cu_seqlens_ptr + num_rows + 2 + row, 2 * row + 2)
        if row == 0:
            tl.store(cu_seqlens_ptr + num_rows + 1, 0)
    last = tl.minimum(tl.maximum(known - 1, 0), ids_stride - 1)
    tl.store(per_row_ptr + row, tl.load(ids_ptr + last))
    limit = tl.load(limits_ptr + row)
    if WHOLE:
        limit = tl.where(_covered(whole_ptr, table_ptr, known - 1, known * 0 + 1, BLOCK_SIZE, BLOCKS) != 0, limit, 0)
    tl.store(per_row_ptr + num_rows + row, limit)
    tl.store(cu_seqlens_ptr + row + 1, row + 1)
    if row == 0:
        tl.store(cu_seqlens_ptr, 0)
    for begin in range(0, num_blocks, BLOCKS):
        index = begin + tl.arange(0, BLOCKS)
        entry = tl.load(table_ptr + index, mask=index < num_blocks, other=0)
        tl.store(row_table_ptr + row.to(tl.int64) * num_blocks + index, entry, mask=index < num_blocks)


def row_places(
    slots: Slots, rows: Tensor, limits: Tensor, num_passes: int, whole: Tensor | None, *, from_before: bool = False
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The fields of rose.speculation.passes.RowPlaces but the last, and those of Pairs (`from_before`; else none).

    rows, limits int32 [R]; whole uint8 [num_blocks + 1].
    """
    assert rows.is_contiguous(), "read as dense"
    assert limits.is_contiguous(), "read as dense"
    num_rows, num_blocks = len(rows), slots.block_table.shape[1]
    places, per_row = rows.new_empty(5, num_passes, num_rows), rows.new_empty(2, num_rows)
    table, cu_seqlens = rows.new_empty(num_rows, num_blocks), rows.new_empty(1 + from_before, num_rows + 1)
    pairs = rows.new_empty(3, 2 * num_rows) if from_before else None
    _places_kernel[(num_rows,)](
        rows, limits, slots.ids, slots.num_tokens, slots.num_prompt, slots.block_table,
        whole, places, per_row, table, cu_seqlens, pairs,
        num_rows, num_passes, slots.ids.stride(0), slots.block_table.stride(0), num_blocks, slots.max_model_len,
        slots.dummy_block, WHOLE=whole is not None, PAIRS=from_before, PASSES=next_power_of_2(num_passes),
        BLOCK_SIZE=slots.block_size, BLOCKS=min(_BLOCKS, next_power_of_2(num_blocks)), **pdl(rows),
    )  # fmt: skip
    return (*places, *per_row, table, cu_seqlens[0]), () if pairs is None else (*pairs, cu_seqlens[1])


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _before_kernel(
    slots_ptr, cu_seqlens_ptr, kv_lengths_ptr, table_ptr, input_ids_ptr, positions_ptr, mapping_ptr, ids_ptr,
    per_token_ptr, cu_out_ptr, lengths_ptr, row_table_ptr,
    num_tokens, num_rows, ids_stride, table_stride, num_blocks, max_model_len, dummy,
    BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """per_token int32 [3, T + R]: ids, positions, slot mapping."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start, end = tl.load(cu_seqlens_ptr + row), tl.load(cu_seqlens_ptr + row + 1)
    length = tl.load(kv_lengths_ptr + row)
    begin, field = length - (end - start), num_tokens + num_rows
    for first in range(start, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        at, inside = per_token_ptr + token, token < end
        tl.store(at, tl.load(input_ids_ptr + token, mask=inside), mask=inside)
        tl.store(at + field, tl.load(positions_ptr + token, mask=inside), mask=inside)
        tl.store(at + 2 * field, tl.load(mapping_ptr + token, mask=inside), mask=inside)
    table_ptr += row.to(tl.int64) * table_stride
    place = tl.maximum(begin - 1, 0)
    block = tl.where(begin > 0, tl.load(table_ptr + place // BLOCK_SIZE), dummy)
    at = per_token_ptr + num_tokens + row
    tl.store(at, tl.load(ids_ptr + slot * ids_stride + place))
    tl.store(at + field, tl.minimum(place, max_model_len - 1))
    tl.store(at + 2 * field, block * BLOCK_SIZE + place % BLOCK_SIZE)
    tl.store(lengths_ptr + row, length)
    tl.store(lengths_ptr + num_rows + row, place + 1)
    tl.store(cu_out_ptr + row + 1, end)
    tl.store(cu_out_ptr + num_rows + row + 1, num_tokens + row + 1)
    if row == 0:
        tl.store(cu_out_ptr, 0)
    row_table_ptr += row.to(tl.int64) * num_blocks
    for first in range(0, num_blocks, BLOCKS):
        index = first + tl.arange(0, BLOCKS)
        entry = tl.load(table_ptr + index, mask=index < num_blocks, other=0)
        tl.store(row_table_ptr + index, entry, mask=index < num_blocks)
        tl.store(row_table_ptr + num_rows.to(tl.int64) * num_blocks + index, entry, mask=index < num_blocks)


def tokens_before(slots: Slots, inputs: RowInputs) -> tuple[Tensor, ...]:
    """What rose.speculation.passes.with_tokens_before is made of. Every token of `inputs` is some row's.

    All int32: ids, positions [T + R], cu_seqlens [2 R + 1], kv_lengths [2 R], block table [2 R, blocks], slot mapping
    [T + R].
    """
    paged, rows = inputs.paged, inputs.slots
    per_row = (rows, paged.cu_seqlens_q, paged.kv_lengths)
    per_token = (inputs.input_ids, inputs.positions, paged.slot_mapping)
    assert all(each.is_contiguous() for each in (*per_row, *per_token)), "read as dense"
    assert paged.block_table.stride(1) == 1, "read as dense"
    num_tokens, (num_rows, num_blocks) = len(inputs.input_ids), paged.block_table.shape
    tokens = rows.new_empty(3, num_tokens + num_rows)
    cu_seqlens, kv_lengths = rows.new_empty(2 * num_rows + 1), rows.new_empty(2 * num_rows)
    table = rows.new_empty(2 * num_rows, num_blocks)
    _before_kernel[(num_rows,)](
        *per_row, paged.block_table, *per_token, slots.ids, tokens, cu_seqlens, kv_lengths, table,
        num_tokens, num_rows, slots.ids.stride(0), paged.block_table.stride(0), num_blocks, slots.max_model_len,
        slots.dummy_block, BLOCK_SIZE=slots.block_size, BLOCKS=min(_BLOCKS, next_power_of_2(num_blocks)),
        TOKENS=_TOKENS, **pdl(rows),
    )  # fmt: skip
    return tokens[0], tokens[1], cu_seqlens, kv_lengths, table, tokens[2]


@triton.jit(do_not_specialize=["num_tokens"])
def _close_kernel(
    slots_ptr, cu_seqlens_ptr, kv_lengths_ptr, mapping_ptr, table_ptr, whole_ptr, given_ptr, new_ptr, recycled_ptr,
    hidden_ptr, table_stride, num_tokens, hidden_size, num_places,
    FILLED: tl.constexpr, LACKS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start, end = tl.load(cu_seqlens_ptr + row), tl.load(cu_seqlens_ptr + row + 1)
    value, lacking = start * 0, -1  # block that lacks its last entry
    if FILLED:
        table_ptr += slot * table_stride
        before = tl.load(kv_lengths_ptr + row) - (end - start)
        value = _covered(whole_ptr, table_ptr, before, value + 1, BLOCK_SIZE, BLOCKS)
        ends_block = (value != 0) & (before > 0) & (before % BLOCK_SIZE == 0)
        ended = tl.load(table_ptr + tl.maximum(before - 1, 0) // BLOCK_SIZE)
        tl.store(whole_ptr + ended, (value * 0 + 1).to(tl.uint8), mask=ends_block)
        if LACKS:
            new = tl.load(new_ptr + row)
            lacks = (value != 0) & (new == num_places) & ((before + new) % BLOCK_SIZE == 0)
            lacking = tl.load(mapping_ptr + start + new - 1, mask=lacks, other=-BLOCK_SIZE) // BLOCK_SIZE
    for begin in range(start, end, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        block = tl.load(mapping_ptr + token, mask=token < end, other=0) // BLOCK_SIZE
        mark = tl.where(block == lacking, _LACKS_LAST, value)
        tl.store(whole_ptr + block, mark.to(tl.uint8), mask=token < end)
    if HIDDEN:
        given = tl.load(given_ptr + row)
        kept = tl.where(given > 0, given, tl.load(new_ptr + row))
        source = tl.minimum(start + tl.maximum(kept, 1), num_tokens).to(tl.int64) - 1
        for begin in range(0, hidden_size, SIZE):
            column = begin + tl.arange(0, SIZE)
            inside = column < hidden_size
            state = tl.load(recycled_ptr + source * hidden_size + column, mask=inside)
            tl.store(hidden_ptr + slot * hidden_size + column, state, mask=inside)


def close_rows(
    slots: Slots,
    whole: Tensor,
    rows: Tensor,
    paged: tuple[Tensor, Tensor, Tensor],
    *,
    filled: bool,
    num_places: int = 0,
    kept: tuple[Tensor, Tensor] | None = None,
    states: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Marks the blocks of a step's tokens in `whole` (uint8 [num_blocks + 1], see rose.speculation.kept_blocks), and
    copies what a head made of each row's last token that counts to the row's slot. Rows of `num_places` new tokens have
    no entry for their last draft; 0: all have. Rows that share a block which one of them completes may find it as it
    was or as it is then: at worst their own blocks count as gaps.

    rows int32 [R]; paged: cu_seqlens_q [R + 1], kv_lengths [R], slot_mapping [T] of the step, int32. With `states`
    (recycled [T, H] and hidden [S + 1, H], contiguous) or `num_places`, `kept` are num_given and num_new, int32 [R].
    """
    cu_seqlens, kv_lengths, slot_mapping = paged
    assert all(each.is_contiguous() for each in (rows, *paged, *(kept or ()), *(states or ()))), "read as dense"
    recycled, hidden = states or (None, None)
    given, new = kept or (None, None)
    size = 1 if hidden is None else hidden.shape[1]
    _close_kernel[(len(rows),)](
        rows, cu_seqlens, kv_lengths, slot_mapping, slots.block_table, whole, given, new, recycled,
        hidden, slots.block_table.stride(0), len(slot_mapping), size, num_places,
        FILLED=filled, LACKS=num_places > 0, HIDDEN=states is not None, BLOCK_SIZE=slots.block_size,
        BLOCKS=min(_BLOCKS, next_power_of_2(slots.block_table.shape[1])), TOKENS=_TOKENS,
        SIZE=min(_SIZE, next_power_of_2(size)), **pdl(rows),
    )  # fmt: skip


@triton.jit
def _take_kernel(
    rows_ptr, source_ptr, target_ptr, size, SIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = tl.load(rows_ptr + row).to(tl.int64)
    value = tl.load(source_ptr + source * size + column, mask=column < size)
    tl.store(target_ptr + row * size + column, value, mask=column < size)


def take_rows(source: Tensor, rows: Tensor) -> Tensor:
    """source [N, H], contiguous, at rows int32 [R] -> [R, H]."""
    assert source.is_contiguous(), "read as dense"
    size = source.shape[1]
    block = min(_SIZE, next_power_of_2(size))
    target = source.new_empty(len(rows), size)
    _take_kernel[(len(rows), triton.cdiv(size, block))](rows, source, target, size, SIZE=block, **pdl(source))
    return target


@triton.jit
def _spread_kernel(
    said_ptr, places_ptr, logits_ptr, said_stride, vocab_size, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = tl.load(places_ptr + column, mask=column < vocab_size, other=-1)  # a constant
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    said = tl.load(said_ptr + row * said_stride + place, mask=place >= 0, other=float("-inf"))
    tl.store(logits_ptr + row * vocab_size + column, said.to(tl.float32), mask=column < vocab_size)


def spread_logits(said: Tensor, places: Tensor) -> Tensor:
    """said [N, n], its rows contiguous, to where places (int32 [V], negative where there is none) say: float32 [N, V],
    -inf elsewhere."""
    assert said.stride(1) == 1, "rows are read as dense"
    num_rows, vocab_size = len(said), len(places)
    logits = said.new_empty(num_rows, vocab_size, dtype=torch.float32)
    _spread_kernel[(num_rows, triton.cdiv(vocab_size, _SIZE))](
        said, places, logits, said.stride(0), vocab_size, TILE=_SIZE, **pdl(said)
    )
    return logits
