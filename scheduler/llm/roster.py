"""The live sequences, wherever they are: how they come, how they end, and what is told about them."""

from collections.abc import Iterable

from ipc.submit import RejectCode
from ipc.types import ModelFacts
from scheduler.config import SchedulerConfig
from scheduler.llm.deadlines import Deadlines
from scheduler.llm.figures import Figures
from scheduler.llm.lanes import Lanes
from scheduler.llm.residents import Residents
from scheduler.llm.sequence import Sequence
from scheduler.llm.trials import Trials
from scheduler.planner import Reply
from scheduler.pool import Pool
from scheduler.request import Request
from scheduler.stats import Stats


class Roster:
    """A sequence is in the pool from its arrival to its end; it waits there, is held for a trial, or is resident."""

    def __init__(self, facts: ModelFacts, config: SchedulerConfig, stats: Stats) -> None:
        self.lanes = Lanes()
        self.residents = Residents(facts, self.lanes, config.prefix_cache)
        self.pool: Pool[Sequence] = Pool(config.max_pending_requests, config.max_pending_tokens)
        self.trials = Trials()
        self.figures = stats.generation = stats.generation or Figures()
        self._stats = stats
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._misfits: list[Sequence] = []  # that the memory of new ranks can never hold

    def enter(self, request: Request, suspect: bool) -> None:
        """Of a request that the door has opened."""
        self._arrivals += 1
        sequence = Sequence.from_request(request, self._arrivals)
        self.lanes.add(sequence)
        if suspect:
            self.trials.hold(sequence)
        self.pool.add(sequence)
        self._deadlines.add(sequence, self.pool.num_requests)

    def find(self, gateway: int, chunk_id: int | None) -> list[Sequence]:
        """One chunk's, or with None all of a gateway's."""
        if chunk_id is None:
            return self.pool.of_gateway(gateway)
        found = self.pool.find(gateway, chunk_id)
        return [] if found is None else [found]

    def may_go_elsewhere(self, sequence: Sequence) -> bool:
        """Whether another replica could have it: nothing of it is in flight, suspected or streamed."""
        waits = sequence.slot < 0 and not sequence.held and sequence is not self.trials.current
        return waits and not self.lanes.in_flight[sequence.lane] and len(sequence.ids) == sequence.num_prompt

    def resize(self, num_blocks: int) -> None:
        """The next ranks have so many blocks; nobody is resident."""
        self.residents.forget_memory(num_blocks)
        self._misfits = [each for each in self.pool if self.residents.num_blocks_for(each.limit) > num_blocks]

    # --- endings --------------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Reply]:
        """Ends those whose deadline has passed, waiting or running, and those for whom memory became too small."""
        message = "the deadline passed before the generation ended"
        replies = [self.reject(each, "expired", message) for each in self._deadlines.pop(now)]
        misfits, self._misfits = self._misfits, []
        message = f"prompt and max_tokens fill more than the {self.residents.blocks.num_blocks} blocks of the ranks now"
        return replies + [self.reject(each, "out_of_memory", message, 0) for each in misfits if not each.done]

    def reject(
        self,
        sequence: Sequence,
        code: RejectCode,
        message: str,
        index: int | None = None,
        retry_after_ms: int = 0,
        outcome: str | None = None,
    ) -> Reply:
        """Ends it; `outcome` is what it is counted as, if not `code`."""
        self.end(sequence, outcome or code)
        return Reply(sequence.gateway, sequence.request.rejection(code, message, index, retry_after_ms))

    def end(self, sequence: Sequence, outcome: str) -> None:
        """No further step will contain it; rows in flight are dropped when they come back."""
        lanes, lane, request = self.lanes, sequence.lane, sequence.request
        sequence.done = lanes.done[lane] = True
        if sequence.slot >= 0:
            self.residents.leave(sequence)
        self.trials.end(sequence)
        self.pool.close(sequence)
        self.free([lane])
        self._stats.requests[outcome] += 1
        if request.first_step_at is not None:
            self._stats.queue_seconds.observe(request.first_step_at - request.arrival)

    def free(self, lanes: Iterable[int]) -> None:
        """The lanes of those that are done, once no row of them is in flight."""
        for lane in lanes:
            if self.lanes.done[lane] and not self.lanes.in_flight[lane]:
                self.lanes.remove(lane)

    # --- figures --------------------------------------------------------------------------------------------

    def publish(self, num_steps_in_flight: int) -> None:
        stats, figures, residents = self._stats, self.figures, self.residents
        stats.pending_requests = self.pool.num_requests
        stats.pending_tokens = self.pool.num_tokens
        stats.steps_in_flight = num_steps_in_flight
        figures.running_sequences = len(residents.running)
        figures.waiting_sequences = self.pool.num_requests - len(residents.running)
        figures.blocks = residents.blocks.num_blocks
        figures.blocks_used = residents.blocks.num_blocks - residents.blocks.num_free
        figures.blocks_cached = residents.blocks.num_cached
