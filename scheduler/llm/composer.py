"""What goes into the next generate step: prefill chunks, then decode or verify rows.

Decode rows go first in tokens, but for a share that prefill keeps while it has work; prefill shares the rest between
the classes (scheduler.sharing). Blocks are reserved up to what a row may need (ipc/README.md). Knows nothing of
answers, clocks and failures.
"""

from collections.abc import Callable

import numpy as np

from ipc.types import ModelFacts
from scheduler.config import SchedulerConfig
from scheduler.llm.draft_lengths import keeps_draft
from scheduler.llm.lanes import NOWHERE, Flags, Ints
from scheduler.llm.memory import Memory
from scheduler.llm.prefills import Prefills
from scheduler.llm.roster import Roster
from scheduler.llm.sequence import Sequence
from scheduler.llm.tables import Tables
from scheduler.sharing import Room, Sharing

PREFILL_SHARE = 0.25  # of a step's tokens, kept for prefill where decode rows would take all

DraftLength = Callable[[int], int]


class Composer:
    """`draft_length(num_seqs)` is how many tokens a step of so many decode rows, and nothing else, should draft."""

    def __init__(self, facts: ModelFacts, config: SchedulerConfig, roster: Roster, draft_length: DraftLength) -> None:
        self._facts = facts
        self._residents, self._lanes, self._pool = roster.residents, roster.lanes, roster.pool
        self._memory = Memory(roster.residents, roster.pool, roster.figures, facts.max_num_seqs, config.bulk_share)
        self._sharing = Sharing(config.bulk_share, config.bulk_wait_ms)
        self._draft_length = draft_length
        self._turn = 0

    def compose(self, tables: Tables, num_seqs: int, num_tokens: int, now: float) -> None:
        """A step of everybody's rows, `num_seqs` and `num_tokens` at most."""
        decoding = self._wanting(self._residents.running_lanes)
        if self._has_prefills():
            kept = min(max(int(num_tokens * PREFILL_SHARE), 1), num_tokens // 2)
            num_decodes = min(len(decoding), num_tokens - kept)
            num_left = num_tokens - num_decodes
            room = Room(max(num_seqs - len(decoding), 1), num_left, float(num_left))
            filling = Prefills(tables, room, self._residents, self._memory, self._pool, now)
            self._sharing.fill(filling, now)
            num_seqs, num_tokens = num_seqs - len(tables.prefills), num_decodes + room.num_tokens
            decoding = self._untouched(tables, decoding)
        elif len(decoding):
            tables.draft_length = self._draft_length_of(len(decoding), num_tokens)
        self._add_decodes(tables, decoding, num_seqs, num_tokens)
        tables.keep_draft = keeps_draft(self._facts, tables.num_rows)

    def compose_trial(self, tables: Tables, sequence: Sequence, num_tokens: int, now: float) -> None:
        """A step of one sequence alone."""
        room = Room(1, num_tokens, float(num_tokens))
        prefills = Prefills(tables, room, self._residents, self._memory, self._pool, now, alone=True)
        if sequence.slot < 0:
            prefills.admit(sequence, num_tokens)
        elif sequence.prefilling:
            prefills.go_on(sequence, num_tokens)
        else:
            tables.draft_length = self._draft_length_of(1, num_tokens)
            self._add_decodes(tables, self._wanting(np.array([sequence.lane])), 1, num_tokens, alone=True)

    # --- decode rows ----------------------------------------------------------------------------------------

    def _wanting(self, candidates: Ints) -> Ints:
        """Those for whom a further decode row could give a token that is still needed."""
        lanes = self._lanes
        wanting = lanes.known[candidates] + lanes.min_new[candidates] < lanes.limit[candidates]
        wanting &= lanes.decoding[candidates]
        return candidates[wanting]

    def _untouched(self, tables: Tables, candidates: Ints) -> Ints:
        """Those that prefill has not preempted; one that it has let in again has a row already."""
        lanes = self._lanes
        untouched: Flags = lanes.generation[candidates] != NOWHERE
        untouched &= lanes.stepped[candidates] != tables.step
        return candidates[untouched]

    def _draft_length_of(self, num_seqs: int, num_tokens: int) -> int:
        return min(self._draft_length(num_seqs), self._facts.max_draft_tokens, max(num_tokens // num_seqs - 1, 0))

    def _add_decodes(self, tables: Tables, chosen: Ints, num_seqs: int, num_tokens: int, alone: bool = False) -> None:
        lanes, k, size = self._lanes, tables.draft_length, self._residents.block_size
        num_rows = max(min(num_seqs, num_tokens // (1 + k)), 0)
        if len(chosen) > num_rows:
            chosen = self._longest_waiting(chosen, num_rows)
        if not len(chosen):
            return
        known, limit = lanes.known[chosen], lanes.limit[chosen]
        drafts = np.minimum(k, limit - known - lanes.min_new[chosen] - 1) if k else np.zeros(len(chosen), np.int64)
        bounds = known + lanes.max_new[chosen] + drafts
        # tokens past the limit need no memory
        missing = (np.minimum(bounds, limit) + (size - 1)) // size - lanes.num_blocks[chosen]
        if missing.max() > 0:
            granted = self._reserve(tables, chosen, missing, alone)
            chosen, drafts, bounds = chosen[granted], drafts[granted], bounds[granted]
        tables.add_decodes(chosen, drafts, bounds, lanes)

    def _longest_waiting(self, candidates: Ints, num_rows: int) -> Ints:
        """In their order. Among those that have waited equally long, everybody gets a turn."""
        turns = np.roll(np.arange(len(candidates)), -(self._turn % len(candidates)))
        self._turn += num_rows
        waited = np.argsort(self._lanes.stepped[candidates[turns]], kind="stable")
        return candidates[np.sort(turns[waited[:num_rows]])]

    def _reserve(self, tables: Tables, chosen: Ints, missing: Ints, alone: bool) -> Flags:
        """Blocks for these decode rows; returns which of them may go."""
        lanes, residents = self._lanes, self._residents
        short = np.flatnonzero(missing > 0)
        granted = np.ones(len(chosen), np.bool_)
        if missing.max() == 1 and len(short) <= residents.blocks.num_free:
            needing = chosen[short]
            first = lanes.num_blocks[needing]
            tables.add_blocks(lanes.slot[needing], first, residents.extend_each(needing))
            return granted
        for index in short.tolist():
            sequence = lanes.at(int(chosen[index]))
            if sequence.slot < 0:
                continue  # preempted for one of the rows before
            granted[index] = self._memory.reserve(tables, sequence, int(missing[index]), alone)
            if not granted[index] and sequence is residents.running[-1]:
                self._memory.preempt(sequence)
        granted &= lanes.generation[chosen] != NOWHERE
        return granted

    # --- prefill rows ---------------------------------------------------------------------------------------

    def _has_prefills(self) -> bool:
        """Whether a prefill row is at all likely: what waits for a slot does not count."""
        residents = self._residents
        if not self._lanes.decoding[residents.running_lanes].all():
            return True
        interactive = self._pool.first("interactive")
        if residents.free_slots:
            return interactive is not None or self._pool.first("bulk") is not None
        return interactive is not None and self._memory.may_displace(interactive)
