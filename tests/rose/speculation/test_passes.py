"""Where a draft's passes lie: by kernels as in torch, and what of a row comes before what."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ipc.types import ModelFacts
from rose.generate_batch import spans
from rose.sampling.params import Needs
from rose.slots import Slots
from rose.speculation.passes import Passes, Tokens, open_passes, with_tokens_before
from rose.speculation.protocol import DraftRows
from tests.rose.speculation.no_waits import no_waits
from tests.rose.speculation.whole_steps import Way, going

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FACTS = ModelFacts(
    name="", architecture="", task="generate", vocab_size=999, max_model_len=70, dimension=1,
    max_num_seqs=6, max_num_batched_tokens=512, num_blocks=40, max_draft_tokens=3,
)  # fmt: skip
NOBODY = FACTS.max_num_seqs
KNOWN = {4: 33, 0: 2, 3: 1, 1: 17, NOBODY: 0, 5: 70}  # tokens by slot: also behind a block, and at the end
Found = tuple[Tensor, ...]


@pytest.fixture
def slots() -> Slots:
    slots, draw = Slots(FACTS, FACTS.num_blocks, DEVICE), np.random.default_rng(0)
    slots.ids.copy_(torch.from_numpy(draw.integers(0, 999, slots.ids.shape)))
    blocks = iter(draw.permutation(FACTS.num_blocks))
    for slot, length in KNOWN.items():
        slots.num_tokens[slot], slots.num_computed[slot] = length, max(length - 1, 0)
        for index in range(-(-length // slots.block_size)):
            slots.block_table[slot, index] = int(next(blocks))
    return slots


def tensors(tokens: Tokens) -> Found:
    return tokens.input_ids, tokens.positions, *tokens.paged[:4]


def by_kernels(find: Callable[[], Any]) -> Any:
    with going("kernels"), torch.inference_mode(), no_waits():
        return find()


def places_of(slots: Slots, slot: int, positions: list[int]) -> list[int]:
    """Where entries at `positions` lie; negative ones in the dummy block."""
    size, table = slots.block_size, slots.block_table[slot].tolist()
    return [table[p // size] * size + p % size if p >= 0 else slots.dummy_block * size for p in positions]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("num_passes", [1, 4])
def test_a_first_pass_over_two_tokens(slots: Slots, num_passes: int, whole: bool) -> None:
    rows = torch.tensor(list(KNOWN), dtype=torch.int32, device=DEVICE)
    flags = torch.ones(slots.dummy_block + 1, dtype=torch.uint8, device=DEVICE) if whole else None
    draft_rows = DraftRows(rows, torch.full_like(rows, num_passes), num_passes, 70, Needs())

    def find() -> tuple[Passes, list[Found]]:
        passes = open_passes(slots, draft_rows, num_passes, flags, from_before=True)
        return passes, [tensors(passes.first()), *(tensors(passes.tokens(rows, p)) for p in range(num_passes))]

    with going("torch"):
        passes, found = find()
    others, by_kernel = by_kernels(find)
    for ours, theirs in zip(by_kernel, found, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
    for one, other in zip(others.found, passes.found, strict=True):
        assert torch.equal(one, other)
    first = passes.first()
    for row, (slot, length) in enumerate(KNOWN.items()):
        if slot == NOBODY:
            continue
        own = slice(2 * row, 2 * row + 2)
        assert first.paged.slot_mapping[own].tolist() == places_of(slots, slot, [length - 2, length - 1])
        assert first.input_ids[own].tolist() == slots.ids[slot, [max(length - 2, 0), length - 1]].tolist()
        assert first.positions[own].tolist() == [max(length - 2, 0), length - 1]
        assert int(first.paged.kv_lengths[row]) == length
    assert first.paged.max_q_len == 2
    values = torch.arange(len(first.input_ids), device=DEVICE)[:, None].repeat(1, 3)
    assert passes.last_of(values)[:, 0].tolist() == list(range(1, 2 * len(rows), 2))


@pytest.mark.parametrize("counts", [[1] * 6, [1, 0, 1, 9, 0, 1], [1, 2, 1, 150, 1, 3]])
def test_tokens_before_a_steps_own(slots: Slots, counts: list[int]) -> None:
    """Decode rows, chunks of prompts, rows of nobody and of no token; a row that begins a sequence has none before."""
    for way in ("torch", "kernels"):
        check_tokens_before(slots, counts, way)  # type: ignore[arg-type]


def check_tokens_before(slots: Slots, counts: list[int], way: Way) -> None:
    rows = torch.tensor(list(KNOWN), dtype=torch.int32, device=DEVICE)
    inputs = slots.inputs(rows, spans(np.array(counts), DEVICE), max(counts), 70)
    with going(way):
        tokens = (
            with_tokens_before(slots, inputs)
            if way == "torch"
            else by_kernels(lambda: with_tokens_before(slots, inputs))
        )
    num_tokens, num_rows, paged = sum(counts), len(rows), tokens.paged
    for found, own in (
        (tokens.input_ids, inputs.input_ids),
        (tokens.positions, inputs.positions),
        (paged.slot_mapping, inputs.paged.slot_mapping),
        (paged.cu_seqlens_q, inputs.paged.cu_seqlens_q),
        (paged.kv_lengths, inputs.paged.kv_lengths),
    ):
        assert found.dtype == torch.int32
        assert torch.equal(found[: len(own)], own)
    assert torch.equal(paged.block_table, inputs.paged.block_table.repeat(2, 1))
    assert paged.cu_seqlens_q[num_rows:].tolist() == list(range(num_tokens, num_tokens + num_rows + 1))
    begins = (inputs.paged.kv_lengths - inputs.paged.cu_seqlens_q.diff()).tolist()
    for row, (slot, begin) in enumerate(zip(KNOWN, begins, strict=True)):
        before, at = max(begin - 1, 0), num_tokens + row
        assert int(tokens.input_ids[at]) == int(slots.ids[slot, before])
        assert int(tokens.positions[at]) == before
        assert int(paged.kv_lengths[num_rows + row]) == before + 1
        assert [int(paged.slot_mapping[at])] == places_of(slots, slot, [begin - 1])
    assert (paged.max_q_len, paged.max_kv_len) == (max(counts), 70)
