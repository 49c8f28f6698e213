"""State of sequence slots through random tables, against lists in plain Python."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from ipc.types import ModelFacts
from rose.generate_batch import spans
from rose.slots import RowInputs, Slots

CPU = torch.device("cpu")
FACTS = ModelFacts(
    name="test", architecture="test", task="generate", vocab_size=1000, max_model_len=60, dimension=1, max_num_seqs=6,
    max_num_batched_tokens=64, num_blocks=200, block_size=4, max_draft_tokens=3, num_steps_in_flight=2,
)  # fmt: skip
K = FACTS.max_draft_tokens
DUMMY = FACTS.num_blocks
WIDTH = FACTS.max_model_len + (K + 1) * FACTS.num_steps_in_flight


def int32s(values: object) -> Tensor:
    return torch.from_numpy(np.array(values, np.int32))


@dataclass
class Sequence:
    """What a slot must hold. `prompt` is still to be computed from `num_computed` on."""

    prompt: list[int]
    ids: list[int]
    num_computed: int
    blocks: list[int] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        return self.num_computed >= len(self.prompt)

    def place(self, position: int) -> int:
        block, offset = divmod(position, FACTS.block_size)
        return (self.blocks[block] if block < len(self.blocks) else DUMMY) * FACTS.block_size + offset


class Model:
    """Plans random steps, runs them on `Slots`, and knows what must come of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.slots = Slots(FACTS, DUMMY, CPU)
        self.sequences: dict[int, Sequence] = {}
        self.free_blocks = list(range(FACTS.num_blocks))
        self.num_past_table = self.longest = 0

    def token(self) -> int:
        return self.random.randrange(1000)

    def tables(self) -> None:
        leaving = [slot for slot in self.sequences if self.random.random() < 0.03]
        for slot in leaving:
            self.free_blocks += self.sequences.pop(slot).blocks
        self.slots.release(int32s(leaving))
        free = [slot for slot in range(FACTS.max_num_seqs) if slot not in self.sequences]
        self.admit([slot for slot in free if self.random.random() < 0.6])
        self.extend()

    def admit(self, slots: list[int]) -> None:
        ids: list[int] = [self.token() for _ in range(3)]  # of others
        lines = []
        for slot in slots:
            prompt = [self.token() for _ in range(self.random.randint(1, 50))]
            hits = self.random.choice([0, 0, 4, 8]) if len(prompt) > 8 else 0
            lines.append([slot, 0, self.random.randint(1, len(prompt)), hits, 0, 0, len(ids), 0])
            ids += prompt[:hits]
            self.sequences[slot] = Sequence(prompt, prompt[:hits], hits)
        if lines:
            self.slots.admit(int32s(lines), spans(np.array([line[3] for line in lines]), CPU), int32s(ids))

    def extend(self) -> None:
        entries = []
        for slot, sequence in self.sequences.items():
            wanted = -(-min(FACTS.max_model_len, sequence.num_computed + self.random.randint(1, 16)) // 4)
            while len(sequence.blocks) < wanted:
                block = self.free_blocks.pop(self.random.randrange(len(self.free_blocks)))
                entries.append([slot, len(sequence.blocks), block])
                sequence.blocks.append(block)
        self.slots.extend(int32s(entries).reshape(-1, 3))

    def step(self) -> None:
        """Rows of all kinds for some of the sequences."""
        able = [slot for slot, s in self.sequences.items() if len(s.ids) < WIDTH - K - 1]
        chosen = [slot for slot in able if self.random.random() < 0.8]
        if not chosen:
            return
        given, brought, ids, starts = [], [], [self.token()], []
        drafts: dict[int, list[int]] = {}
        for slot in chosen:
            s = self.sequences[slot]
            starts.append(len(ids))
            chunk = 0 if s.decodes else self.random.randint(1, len(s.prompt) - s.num_computed)
            given.append(chunk)
            brought.append(min(chunk + 1, len(s.prompt) - s.num_computed) if chunk else 0)
            ids += s.prompt[s.num_computed : s.num_computed + brought[-1]]
            if s.decodes:
                drafts[slot] = [self.token() for _ in range(self.random.choice([0, K]))]
        slots = int32s(chosen)
        prefill = np.flatnonzero(given)
        self.slots.append_prompt(
            slots[prefill], spans(np.array(brought)[prefill], CPU), int32s(starts)[prefill], int32s(ids)
        )
        for slot, tokens in drafts.items():  # a proposer's work
            n = len(self.sequences[slot].ids)
            self.slots.ids[slot, n : n + len(tokens)] = int32s(tokens)
        q = [chunk or 1 + len(drafts[slot]) for slot, chunk in zip(chosen, given, strict=True)]
        inputs = self.slots.inputs(slots, spans(np.array(q), CPU), max(q), WIDTH)
        self.check_inputs(inputs, chosen, given, drafts, q)
        self.advance(slots, chosen, given, drafts)

    def check_inputs(
        self, inputs: RowInputs, chosen: list[int], given: list[int], drafts: dict[int, list[int]], q: list[int]
    ) -> None:
        begin = 0
        for row, slot in enumerate(chosen):
            s = self.sequences[slot]
            start, end = s.num_computed, begin + q[row]
            known = s.prompt if given[row] else s.ids + drafts[slot]
            wanted = known[start : start + q[row]]
            assert inputs.input_ids[begin:end].tolist() == wanted
            assert inputs.positions[begin:end].tolist() == [min(start + i, 59) for i in range(q[row])]
            assert inputs.paged.slot_mapping[begin:end].tolist() == [s.place(start + i) for i in range(q[row])]
            following = known[start + 1 : start + q[row] + 1]
            assert inputs.next_ids[begin : begin + len(following)].tolist() == following
            assert inputs.paged.kv_lengths[row] == start + q[row]
            table = inputs.paged.block_table[row].tolist()
            assert table == s.blocks + [DUMMY] * (len(table) - len(s.blocks))
            self.num_past_table += start + q[row] > len(s.blocks) * 4
            begin = end
        assert inputs.paged.cu_seqlens_q.tolist() == [0, *np.cumsum(q).tolist()]

    def advance(self, slots: Tensor, chosen: list[int], given: list[int], drafts: dict[int, list[int]]) -> None:
        tokens = [[self.token() for _ in range(K + 1)] for _ in chosen]
        num_new = []
        for slot, chunk, row_tokens in zip(chosen, given, tokens, strict=True):
            s = self.sequences[slot]
            if chunk:
                num_new.append(int(s.num_computed + chunk == len(s.prompt)))
                s.num_computed += chunk
                s.ids = s.prompt[: s.num_computed] + row_tokens[: num_new[-1]]
            else:
                num_new.append(self.random.randint(1, len(drafts[slot]) + 1))
                s.num_computed += num_new[-1]
                s.ids += row_tokens[: num_new[-1]]
        lengths = self.slots.advance(slots, int32s(given), int32s(tokens), int32s(num_new))
        assert lengths.tolist() == [len(self.sequences[slot].ids) for slot in chosen]

    def check_state(self) -> None:
        for slot in range(FACTS.max_num_seqs):
            s = self.sequences.get(slot, Sequence([], [], 0))
            assert self.slots.num_tokens[slot] == len(s.ids)
            self.longest = max(self.longest, len(s.ids))
            assert self.slots.num_computed[slot] == s.num_computed
            assert self.slots.ids[slot, : len(s.ids)].tolist() == s.ids
            assert self.slots.block_table[slot].tolist() == s.blocks + [DUMMY] * (17 - len(s.blocks))


@pytest.mark.parametrize("seed", range(4))
def test_random_tables(seed: int) -> None:
    model = Model(seed)
    for _ in range(120):
        model.tables()
        model.step()
        model.check_state()
    assert model.num_past_table > 5
    assert model.longest > FACTS.max_model_len


def test_a_slot_at_its_end_stays_within_its_memory() -> None:
    """More rows than a scheduler may plan behind the end: nothing outside the slot is written."""
    slots = Slots(FACTS, DUMMY, CPU)
    slots.num_computed[2], slots.num_tokens[2] = WIDTH - 1, WIDTH
    slots.ids[3] = 77
    row = int32s([2])
    for _ in range(3):
        inputs = slots.inputs(row, spans(np.array([4]), CPU), 4, WIDTH + 4)
        assert int(inputs.paged.kv_lengths[0]) == inputs.paged.max_kv_len == WIDTH
        assert (inputs.paged.slot_mapping // FACTS.block_size == DUMMY).all()
        assert inputs.positions.tolist() == [FACTS.max_model_len - 1] * 4
        slots.advance(row, int32s([0]), int32s([[5, 6, 7, 8]]), int32s([4]))
    assert (slots.ids[3] == 77).all()
    assert (slots.ids[1] == 0).all()


def test_clear_empties_every_slot() -> None:
    model = Model(5)
    for _ in range(20):
        model.tables()
        model.step()
    model.slots.clear()
    model.sequences.clear()
    model.check_state()
