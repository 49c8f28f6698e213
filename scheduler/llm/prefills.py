"""The prefill rows of a generate step: chunks of sequences in slots, then of those that wait for one, in order."""

from collections.abc import Iterator

from ipc.types import Priority
from scheduler.llm.memory import Memory
from scheduler.llm.residents import Residents
from scheduler.llm.sequence import Sequence
from scheduler.llm.tables import Tables
from scheduler.pool import Pool
from scheduler.sharing import Room

_MAX_PASSED_OVER = 64  # in one step, of those that wait for what others compute: a bound on what looking at them costs


class Prefills:
    """Implements scheduler.sharing.Filling for one step. `alone`: of a sequence that stands trial."""

    def __init__(
        self,
        tables: Tables,
        room: Room,
        residents: Residents,
        memory: Memory,
        pool: Pool[Sequence],
        now: float,
        alone: bool = False,
    ) -> None:
        self.room = room
        self._tables, self._residents, self._memory, self._pool = tables, residents, memory, pool
        self._now, self._alone = now, alone
        self._closed = False  # the first in line lacks blocks: nobody overtakes it
        self._computing = residents.computing()

    def bulk_since(self) -> float | None:
        first = next(self._unfinished("bulk"), None) or self._pool.first("bulk")
        return None if first is None else first.request.arrival

    def take(self, priority: Priority, max_seqs: int, max_cost: float) -> float:
        max_tokens = before = int(max_cost)
        for sequence in list(self._unfinished(priority)):
            if sequence.slot >= 0 and max_seqs > 0 and (count := self.go_on(sequence, max_tokens)):
                max_seqs, max_tokens = max_seqs - 1, max_tokens - count
        passed_over: list[Sequence] = []
        while not self._closed and max_seqs > 0 and (waiting := self._pool.first(priority)) is not None:
            if len(passed_over) < _MAX_PASSED_OVER and self._should_wait(waiting):
                self._pool.dequeue(waiting)
                passed_over.append(waiting)
                continue
            count = self.admit(waiting, max_tokens)
            if not count:
                break
            max_seqs, max_tokens = max_seqs - 1, max_tokens - count
        for waiting in reversed(passed_over):
            self._pool.put_front(waiting)
        return float(before - max_tokens)

    def go_on(self, sequence: Sequence, max_tokens: int) -> int:
        """The next chunk of a sequence in a slot; returns its tokens."""
        count = self._chunk(sequence, sequence.prefill_end - sequence.num_computed, max_tokens)
        if not count:
            return 0
        missing = self._residents.num_blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        if not self._memory.reserve(self._tables, sequence, missing, self._alone):
            if sequence is self._residents.running[-1]:
                self._memory.preempt(sequence)  # what it holds serves the others
            return 0  # those behind it have rows in this step; in the next they yield
        return self._add(sequence, count)

    def admit(self, sequence: Sequence, max_tokens: int) -> int:
        """Into a slot, with its first chunk; returns its tokens. 0 where slot, blocks or room in the step are short."""
        residents, memory, tables = self._residents, self._memory, self._tables
        if residents.lanes.in_flight[sequence.lane] or not self._chunk(sequence, 1, max_tokens):
            return 0
        if not memory.find_slot(tables, sequence, self._alone):
            return 0
        hits = residents.find_hits(sequence)
        num_hit_tokens = len(hits) * residents.block_size
        count = self._chunk(sequence, len(sequence.ids) - num_hit_tokens, max_tokens)
        if not count or not tables.takes_admission(sequence, num_hit_tokens):
            return 0
        missing = residents.num_blocks_for(num_hit_tokens + count) - len(hits)
        if not memory.find_blocks(tables, sequence, hits, missing, self._alone):
            self._closed = True
            return 0
        self._pool.dequeue(sequence)
        residents.enter(sequence, hits)
        sequence.request.first_step_at = sequence.request.first_step_at or self._now
        tables.admit(sequence, int(residents.lanes.generation[sequence.lane]))
        tables.add_blocks(sequence.slot, len(hits), residents.extend(sequence, missing))
        return self._add(sequence, count)

    def _should_wait(self, sequence: Sequence) -> bool:
        """The choices of one request, say, of which the first has just begun with the prompt that they share."""
        return bool(self._computing) and self._residents.should_wait(sequence, self._computing, self._tables.step)

    def _unfinished(self, priority: Priority) -> Iterator[Sequence]:
        """In slots, with prefill left and no row in this step."""
        stepped = self._residents.lanes.stepped
        return (
            sequence
            for sequence in self._residents.running
            if sequence.prefilling
            and sequence.submit.priority == priority
            and stepped[sequence.lane] != self._tables.step
        )

    def _chunk(self, sequence: Sequence, num_left: int, max_tokens: int) -> int:
        """How many of the `num_left` prefill tokens of `sequence` this step may compute."""
        if sequence.params.prompt_logprobs is not None:
            max_tokens = min(max_tokens, self._tables.max_prompt_lines)
        room = self.room
        return max(0, min(max_tokens, room.num_tokens, num_left)) if room.num_seqs > 0 else 0

    def _add(self, sequence: Sequence, count: int) -> int:
        self._tables.add_prefill(sequence, count, self._residents.lanes)
        if (name := self._residents.name_computing(sequence)) is not None:
            self._computing.add(name)
        self.room.num_seqs -= 1
        self.room.num_tokens -= count
        self.room.cost -= count
        return count
