"""The sequences that are in slots of the ranks' memory, with their blocks: who enters, who leaves, who has how much.

What leaves is free for the very next plan: steps already sent run before it. Decides nothing.
"""

from bisect import insort
from collections import deque

import numpy as np

from ipc.types import ModelFacts
from scheduler.llm.blocks import BlockPool
from scheduler.llm.lanes import NOWHERE, Ints, Lanes
from scheduler.llm.prefix_cache import find_hits, next_name, register
from scheduler.llm.sequence import Sequence

_MAX_GENERATION = 2**31 - 1


class Residents:
    def __init__(self, facts: ModelFacts, lanes: Lanes, prefix_cache: bool) -> None:
        self.block_size = facts.block_size
        self.lanes = lanes
        self.running: list[Sequence] = []  # by `order`
        self.num_bulk = 0
        self._max_num_seqs = facts.max_num_seqs
        self._num_steps_in_flight = facts.num_steps_in_flight
        self._prefix_cache = prefix_cache
        self._lookahead = min(facts.max_draft_tokens, 1)
        self._generation = 0
        self._running_lanes: Ints | None = None
        self.forget_memory(facts.num_blocks)

    def forget_memory(self, num_blocks: int) -> None:
        """The ranks are new ones: nothing is in a slot or a block. Nobody may be running."""
        assert not self.running
        self.blocks = BlockPool(num_blocks)
        self.free_slots = deque(range(self._max_num_seqs))
        self.releases: list[tuple[int, int]] = []  # (slot, generation), not planned yet

    @property
    def running_lanes(self) -> Ints:
        """int64 [num_running], by `order`."""
        if self._running_lanes is None:
            self._running_lanes = np.array([sequence.lane for sequence in self.running], np.int64)
        return self._running_lanes

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def computing(self) -> set[bytes]:
        """Names of what will be hit once the rows of steps not answered yet are (prefix_cache.next_name)."""
        unanswered = (each for each in self.running if each.num_answered < each.num_computed)
        return {name for each in unanswered if (name := self.name_computing(each)) is not None}

    def name_computing(self, sequence: Sequence) -> bytes | None:
        if not self._prefix_cache:
            return None
        return next_name(sequence, sequence.num_registered, sequence.num_computed, self.block_size, self._lookahead)

    def should_wait(self, sequence: Sequence, computing: set[bytes], step: int) -> bool:
        """Whether `sequence` enters better after `step`: what it lacks first is being computed for another."""
        if sequence.params.prompt_logprobs is not None:
            return False
        num_hits = len(self.find_hits(sequence))
        end = len(sequence.ids) - 1
        if next_name(sequence, num_hits, end, self.block_size, self._lookahead) not in computing:
            return False
        return sequence.may_wait(num_hits, step, self._num_steps_in_flight)

    def find_hits(self, sequence: Sequence) -> list[int]:
        """Blocks of the prefix cache. Logprobs of the prompt need every token computed."""
        if not self._prefix_cache or sequence.params.prompt_logprobs is not None:
            return []
        return find_hits(sequence, self.blocks, self.block_size, self._lookahead)

    def enter(self, sequence: Sequence, hits: list[int]) -> None:
        lanes, lane = self.lanes, sequence.lane
        self.blocks.share(hits)
        sequence.enter(self.free_slots.popleft(), hits, len(hits) * self.block_size)
        lanes.slot[lane], lanes.generation[lane] = sequence.slot, self._next_generation()
        lanes.num_blocks[lane] = len(hits)
        insort(self.running, sequence, key=_order)
        self._changed(sequence, 1)

    def leave(self, sequence: Sequence) -> None:
        lanes, lane = self.lanes, sequence.lane
        self.offer(sequence, sequence.num_settled)
        self.free_slots.append(sequence.slot)
        self.releases.append((sequence.slot, int(lanes.generation[lane])))
        self.blocks.give_back(sequence.blocks)
        sequence.leave()
        lanes.slot[lane] = lanes.generation[lane] = NOWHERE
        lanes.num_blocks[lane] = 0
        lanes.decoding[lane] = False
        self.running.remove(sequence)
        self._changed(sequence, -1)

    def borrow(self) -> tuple[int, int, int] | None:
        """A slot, a generation and a block for one step of nobody's, if there are some; both are free after it."""
        if not self.free_slots or not self.blocks.num_free:
            return None
        slot, generation = self.free_slots.popleft(), self._next_generation()
        blocks = self.blocks.take(1)
        self.blocks.give_back(blocks)
        self.free_slots.append(slot)
        self.releases.append((slot, generation))
        return slot, generation, blocks[0]

    def extend(self, sequence: Sequence, count: int) -> list[int]:
        """`count` more blocks for `sequence`, which are free; returns them."""
        blocks = self.blocks.take(count)
        sequence.blocks += blocks
        self.lanes.num_blocks[sequence.lane] += count
        return blocks

    def extend_each(self, lanes: Ints) -> list[int]:
        """One more block for each of these sequences, all of which are free; returns them.

        Those behind can be hit from now on: so it costs a little in many steps and not much at an output's end.
        """
        blocks = self.blocks.take(len(lanes))
        for lane, block in zip(lanes.tolist(), blocks, strict=True):
            sequence = self.lanes.at(lane)
            self.offer(sequence, sequence.num_settled)
            sequence.blocks.append(block)
        self.lanes.num_blocks[lanes] += 1
        return blocks

    def offer(self, sequence: Sequence, num_tokens: int) -> None:
        """The blocks of the first `num_tokens` tokens, whose steps were answered, can be hit from now on."""
        if self._prefix_cache:
            register(sequence, self.blocks, self.block_size, self._lookahead, num_tokens)

    def take_releases(self) -> list[tuple[int, int]]:
        releases, self.releases = self.releases, []
        return releases

    def _next_generation(self) -> int:
        self._generation = self._generation % _MAX_GENERATION + 1
        return self._generation

    def _changed(self, sequence: Sequence, by: int) -> None:
        self._running_lanes = None
        self.num_bulk += by * sequence.is_bulk


def _order(sequence: Sequence) -> tuple[bool, int]:
    return sequence.order
