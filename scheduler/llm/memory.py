"""Who yields memory to whom: slots and blocks for one sequence, if need be from the youngest of the lowest class.

A preempted sequence keeps its tokens and is computed again later; its blocks stay in the prefix cache until they are
needed. A sequence with a row in the step at hand never yields in it.
"""

from scheduler.llm.figures import Figures
from scheduler.llm.residents import Residents
from scheduler.llm.sequence import Sequence
from scheduler.llm.tables import Tables
from scheduler.pool import Pool


class Memory:
    """`alone`, everywhere: the sequence stands trial, and all others yield to it."""

    def __init__(
        self, residents: Residents, pool: Pool[Sequence], figures: Figures, max_num_seqs: int, bulk_share: float
    ) -> None:
        self._residents = residents
        self._pool = pool
        self._figures = figures
        self.num_bulk_slots = max(int(max_num_seqs * bulk_share), int(bulk_share > 0 and max_num_seqs > 1))

    def reserve(self, tables: Tables, sequence: Sequence, missing: int, alone: bool) -> bool:
        """`missing` more blocks for a sequence in a slot; says whether they were to be had."""
        while missing > self._residents.blocks.num_free:
            victim = self._after(tables, sequence, alone)
            if victim is None:
                return False
            self.preempt(victim)
        if missing > 0:
            first = len(sequence.blocks)
            tables.add_blocks(sequence.slot, first, self._residents.extend(sequence, missing))
        return True

    def find_slot(self, tables: Tables, sequence: Sequence, alone: bool) -> bool:
        """Whether a slot is free for `sequence`, which waits for one. While bulk waits, a few are kept for it."""
        kept = 0
        if not sequence.is_bulk and not alone and self._pool.first("bulk") is not None:
            kept = max(self.num_bulk_slots - self._residents.num_bulk, 0)
        return len(self._residents.free_slots) > kept or self._displace(tables, sequence, alone)

    def find_blocks(self, tables: Tables, sequence: Sequence, hits: list[int], missing: int, alone: bool) -> bool:
        """Whether `sequence`, which waits for a slot, can have its `hits` and `missing` more.

        A block for each that runs is left, so that all can go on for a while before somebody is preempted again.
        """
        residents, blocks = self._residents, self._residents.blocks
        while True:
            spare = 0 if alone else len(residents.running)
            if missing + blocks.num_idle_among(hits) + spare <= blocks.num_free:
                return True
            if not self._displace(tables, sequence, alone):
                return False

    def may_displace(self, sequence: Sequence) -> bool:
        """Whether bulk work in slots yields to `sequence`, which waits: all of it but bulk's share of the slots."""
        return not sequence.is_bulk and self._residents.num_bulk > self.num_bulk_slots

    def preempt(self, victim: Sequence) -> None:
        self._residents.leave(victim)
        self._pool.put_front(victim)
        self._figures.num_preemptions += 1

    def _displace(self, tables: Tables, sequence: Sequence, alone: bool) -> bool:
        """Preempts one of those that yield to a sequence that waits; says whether there was one."""
        victim = self._after(tables, sequence, alone) if alone or self.may_displace(sequence) else None
        if victim is None or not (alone or victim.is_bulk):
            return False
        self.preempt(victim)
        return True

    def _after(self, tables: Tables, sequence: Sequence, alone: bool) -> Sequence | None:
        """The last of those that come after `sequence`; alone, of all others."""
        stepped = self._residents.lanes.stepped
        for other in reversed(self._residents.running):
            if not alone and other.order <= sequence.order:
                return None
            if other is not sequence and stepped[other.lane] != tables.step:
                return other
        return None
