"""Rows of a step from the slots' state, and the state after it, against rose.slots in torch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ipc.step import STATUS_NON_FINITE, STATUS_OK
from ipc.types import ModelFacts
from rose.generate_batch import spans
from rose.kernels.slot_rows import DecodeRows, RowOutputs, advance_rows, mark_non_finite, slot_rows
from rose.slots import Slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FACTS = ModelFacts(
    name="test", architecture="test", task="generate", vocab_size=97, max_model_len=40, dimension=1, max_num_seqs=6,
    max_num_batched_tokens=64, num_blocks=30, block_size=4, max_draft_tokens=3,
)  # fmt: skip
NOBODY = FACTS.max_num_seqs


def int32s(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def filled_slots() -> Slots:
    """Decoding sequences: one just begun, one at its last position, one that has gone past it, and others."""
    torch.manual_seed(0)
    slots = Slots(FACTS, FACTS.num_blocks, DEVICE)
    slots.ids.random_(0, FACTS.vocab_size)
    computed = int32s([0, 3, 17, 39, 43, 8, 0])
    slots.num_computed.copy_(computed)
    slots.num_tokens.copy_(computed + 1)
    slots.num_prompt.copy_(int32s([1, 2, 9, 30, 40, 8, 0]))
    order = torch.randperm(FACTS.num_blocks).int()
    for slot, count in enumerate((1, 1, 5, 10, 10, 2)):
        slots.block_table[slot, :count] = order[:count].to(DEVICE)
        order = order[count:]
    return slots


def unset(*shape: int) -> Tensor:
    return torch.full(shape, -7, dtype=torch.int32, device=DEVICE)


def decode_rows(slots: Slots, row_slots: list[int], q: int) -> DecodeRows:
    count = len(row_slots)
    table = unset(count, 8)
    table[:, 0] = int32s(row_slots)
    tokens = [unset(count * q) for _ in range(8)]
    paged = unset(count + 1), unset(count), unset(count, slots.block_table.shape[1])
    return DecodeRows(table, unset(count), *tokens[:4], *paged, *tokens[4:])


def drafts_of(num_rows: int, q: int) -> Tensor:
    """With a gap between the rows."""
    return torch.randint(0, FACTS.vocab_size, (num_rows, q + 1), dtype=torch.int32, device=DEVICE)[:, : q - 1]


@pytest.mark.parametrize("q", [1, 3, 4])
def test_rows(q: int) -> None:
    slots = filled_slots()
    row_slots = [2, 0, 4, 3, 5]
    rows, drafts = decode_rows(slots, [*row_slots, NOBODY, NOBODY], q), drafts_of(7, q)
    slot_rows(slots, rows, drafts)
    torchs = filled_slots()
    torchs.put(int32s(row_slots), drafts[:5])
    expected = torchs.inputs(int32s(row_slots), spans(np.full(5, q), DEVICE), q, 99)
    used, paged, inside = 5 * q, expected.paged, torch.ones(5 * q, dtype=torch.bool, device=DEVICE)
    inside[2 * q : 3 * q] = q == 1  # a row past its end: torch puts all of its drafts into the last place
    assert torch.equal(rows.slots, int32s([*row_slots, NOBODY, NOBODY]))
    assert (rows.status == STATUS_OK).all()
    assert torch.equal(rows.input_ids[:used][inside], expected.input_ids[inside])
    assert torch.equal(rows.positions[:used], expected.positions)
    assert torch.equal(rows.slot_mapping[:used], paged.slot_mapping)
    assert torch.equal(rows.next_ids.view(7, q)[:5, : q - 1], drafts[:5])
    assert torch.equal(rows.cu_seqlens_q, int32s(range(0, 7 * q + 1, q)))
    assert torch.equal(rows.kv_lengths[:5], paged.kv_lengths)
    assert torch.equal(rows.block_table[:5], paged.block_table)
    ahead = torch.arange(q, device=DEVICE)
    assert torch.equal(rows.place_slots.view(7, q), rows.slots[:, None].expand(7, q))
    assert torch.equal(rows.place_positions.view(7, q)[:5], slots.num_tokens[row_slots][:, None] + ahead)
    num_output = (slots.num_tokens - slots.num_prompt)[row_slots]
    assert torch.equal(rows.place_outputs.view(7, q)[:5], num_output[:, None] + ahead)
    assert (rows.kv_lengths[5:] == 0).all()
    for padding in (rows.input_ids, rows.positions, rows.next_ids, rows.place_positions, rows.place_outputs):
        assert (padding[used:] == 0).all()
    assert (rows.slot_mapping[used:] // FACTS.block_size == FACTS.num_blocks).all()
    assert (rows.block_table[5:] == FACTS.num_blocks).all()


@pytest.mark.parametrize("num_new", [[1, 1, 1, 1], [1, 4, 2, 3], [0, 1, 4, 0]])
@pytest.mark.parametrize("room", [4, 6])
def test_advance(num_new: list[int], room: int) -> None:
    """A row that failed goes on but tells no tokens, one whose fault lies behind them does; one past its sequence's end
    writes nothing outside."""
    mine, torchs = filled_slots(), filled_slots()
    row_slots, tokens = [2, 0, 4, 5], torch.randint(0, 97, (6, 4), dtype=torch.int32, device=DEVICE)
    rows = decode_rows(mine, [*row_slots, NOBODY, NOBODY], 4)
    slot_rows(mine, rows, drafts_of(6, 4))
    rows.status[4 + num_new[1] - 1] = STATUS_NON_FINITE
    rows.status[12 + num_new[3]] = STATUS_NON_FINITE  # of a place that gave nothing
    out, before = RowOutputs(unset(6), unset(6), unset(6, room), unset(6), unset(6)), mine.ids.clone()
    advance_rows(mine, rows, tokens, int32s([*num_new, 1, 1]), int32s([3, 2, 0, 1, 0, 0]), out)
    expected = torchs.advance(int32s(row_slots), int32s([0] * 4), tokens[:4], int32s(num_new))
    assert torch.equal(out.lengths, torch.cat([expected, int32s([0, 0])]))
    assert out.status.tolist() == [STATUS_OK, STATUS_NON_FINITE, *[STATUS_OK] * 4]
    assert out.num_tokens.tolist() == [num_new[0], 0, *num_new[2:], 0, 0]
    assert torch.equal(out.tokens[:, :4], tokens)
    assert (out.tokens[:, 4:] == -7).all()
    assert out.num_drafts.tolist() == [3, 2, 0, 1, 0, 0]
    assert torch.equal(mine.num_tokens[:-1], torchs.num_tokens[:-1])
    assert torch.equal(mine.num_computed[:-1], torchs.num_computed[:-1])
    for slot, length in enumerate(mine.num_tokens[:-1].tolist()):
        assert torch.equal(mine.ids[slot, :length], torchs.ids[slot, :length])
        assert torch.equal(mine.ids[slot, length:], before[slot, length:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite(bad: float) -> None:
    logits = torch.randn(4, 9000, device=DEVICE)
    logits[1, 8999] = logits[3, 0] = bad
    status = int32s([0, 0, 1, 0])
    mark_non_finite(logits, status)
    assert status.tolist() == [0, STATUS_NON_FINITE, 1, STATUS_NON_FINITE]
