"""The planner of encoders: batches rows of whole sequences into steps, and finds the row that ends ranks.

After a death, every row that was in flight is a suspect: it runs again alone, with nothing else in flight. Two deaths
while alone convict it. Knows nothing of sockets, clocks and epochs; a step's number is all that names it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ipc.step import STATUS_BAD_TOKEN, STATUS_OK, StepFailed, StepPlan, StepResult
from ipc.step_ring import Arrays
from ipc.submit import RejectCode, Rejected
from ipc.types import MAX_ATTEMPTS, ModelFacts
from scheduler.config import SchedulerConfig
from scheduler.door import RETRY_AFTER_MS, find_refusal
from scheduler.embedding.arrays import read_rows, read_status, write_canary, write_rows
from scheduler.embedding.budget import StepFilling
from scheduler.embedding.door import admit
from scheduler.embedding.rate import Rate
from scheduler.embedding.suspects import Suspects
from scheduler.limits import MemoryLimit
from scheduler.planner import ABORT_CODES, RANKS_AWAY, Reply
from scheduler.pool import Pool
from scheduler.quarantine import MAX_STRIKES, Quarantine, refusal_message
from scheduler.request import Request, Run
from scheduler.sharing import Room, Sharing
from scheduler.stats import Stats


@dataclass(slots=True)
class _Step:
    """A step in flight. `alone`: nothing else may be in flight; `suspect`: its one row stands trial."""

    step: int
    runs: list[Run]
    offsets: list[int] = field(default_factory=list)
    num_seqs: int = 0
    num_tokens: int = 0
    launched_at: float = 0.0
    full: bool = False  # work was left waiting
    alone: bool = False
    suspect: bool = False


class EncodePlanner:
    """Implements scheduler.planner.Planner."""

    def __init__(self, facts: ModelFacts, config: SchedulerConfig, stats: Stats, quarantine: Quarantine) -> None:
        self.facts = facts
        self.config = config
        self._stats = stats
        self._quarantine = quarantine
        self._pool: Pool[Request] = Pool(config.max_pending_requests, config.max_pending_tokens)
        self._sharing = Sharing(config.bulk_share, config.bulk_wait_ms)
        self._in_flight: dict[int, _Step] = {}  # by step number, oldest first
        self._suspects = Suspects()
        self._rate = Rate()
        self._limit = MemoryLimit(facts.max_num_seqs, facts.max_num_batched_tokens)
        self._last_step = 0
        self._finished_at: float | None = None  # when a step last finished; None: a canary is due at once
        self._seen_version = quarantine.version
        self._idle_work = False  # the ranks would make use of an idle step

    # --- the protocol ---------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Rejected | None:
        refusal = self._refusal(request, now)
        if refusal is not None:
            self._stats.requests[refusal.code] += 1
            return refusal
        held = self._quarantine.suspected(request, now)
        request.hold(held)
        self._suspects.hold_last(request, held)
        self._pool.add(request)
        self._publish()
        return None

    def plan(self, now: float, slot: int, arrays: Arrays) -> tuple[StepPlan | None, list[Reply]]:
        replies = self._sweep(now)
        if not self._may_launch():
            return None, replies
        expired: list[Request] = []
        step = self._next_suspect(now, expired) or self._next_batch(now, expired)
        replies += self._expire(expired, now)
        if step is not None:
            step.num_seqs, step.num_tokens, step.offsets = write_rows(step.runs, arrays)
            step.launched_at, step.full = now, self._pool.has_waiting
            self._stats.batch_tokens.observe(step.num_tokens)
        elif self._canary_due(now):
            step = _Step(self._last_step + 1, [])
            step.num_seqs, step.num_tokens = write_canary(arrays)
            self._stats.num_canaries += 1
        elif self._idle_work and not self._in_flight:
            step = _Step(self._last_step + 1, [])
        if step is None:
            return None, replies
        self._last_step = step.step
        self._in_flight[step.step] = step
        self._publish()
        kind: Literal["encode", "idle"] = "encode" if step.num_seqs else "idle"
        return StepPlan(0, step.step, slot, kind, step.num_seqs, step.num_tokens, canary=not step.runs), replies

    def apply(self, result: StepResult | StepFailed, arrays: Arrays, now: float) -> list[Reply]:
        if isinstance(result, StepFailed) and result.kind == "fatal":
            return self.lost(result.epoch, ordered=False, now=now)
        step = self._in_flight.pop(result.step, None)
        if step is None:
            self._stats.stale["rank"] += 1
            return []
        self._idle_work = isinstance(result, StepResult) and result.idle_work
        if isinstance(result, StepFailed):
            self._out_of_memory(step, now)
        else:
            self._finished(step, result, arrays, now)
        return self._close(step.runs, now)

    def abort(self, gateway: int, chunk_id: int | None, reason: str) -> list[Reply]:
        if chunk_id is None:
            requests = self._pool.of_gateway(gateway)
        else:
            found = self._pool.find(gateway, chunk_id)
            requests = [] if found is None else [found]
        if reason == RANKS_AWAY:
            requests = [request for request in requests if request.only_waits]
        for request in requests:
            self._fail(request, ABORT_CODES.get(reason, "aborted"), f"ended before it was done: {reason}")
        return self._replies(requests, now=0.0)

    def lost(self, epoch: int, ordered: bool, now: float) -> list[Reply]:
        steps, self._in_flight = list(self._in_flight.values()), {}
        self._limit.lift()
        self._finished_at = None
        self._idle_work = False
        for step in reversed(steps):  # each goes to the front, so the oldest last
            for run in reversed(step.runs):
                self._return(run, suspect=step.suspect or not ordered)
        runs = [run for step in steps for run in step.runs]
        if not ordered:
            self._blame(steps, {id(run.request): run.request for run in runs}.values(), now)
        return self._close(runs, now)

    # --- the door -------------------------------------------------------------------------------------------

    def _refusal(self, request: Request, now: float) -> Rejected | None:
        """Why `request` cannot enter; None when it can, and then it is open."""
        refusal = find_refusal(request, self._pool, lambda request: admit(request, self.facts), now)
        if refusal is not None:
            return refusal
        num_tokens = self._pool.num_tokens_before(request.submit.priority)
        late_s = now + self._rate.seconds_for(num_tokens) - request.deadline
        if late_s > 0:
            message = "what waits already takes longer than this may: come back later"
            return request.rejection("full", message, None, max(RETRY_AFTER_MS, int(late_s * 1000)))
        row = self._quarantine.match(request, now)
        return None if row is None else request.rejection("quarantined", refusal_message(row), row)

    # --- the next step --------------------------------------------------------------------------------------

    def _may_launch(self) -> bool:
        if any(step.alone for step in self._in_flight.values()):
            return False
        exclusive = self._suspects or self._limit.active
        return len(self._in_flight) < (1 if exclusive else self.facts.num_steps_in_flight)

    def _next_suspect(self, now: float, expired: list[Request]) -> _Step | None:
        run = self._suspects.next(now, expired)
        if run is None:
            return None
        number = self._last_step + 1
        return _Step(number, [run.request.launch(run, number, now)], alone=True, suspect=True)

    def _next_batch(self, now: float, expired: list[Request]) -> _Step | None:
        if not self._pool.has_waiting:
            return None
        limit, budget = self._limit, self.facts.max_num_batched_tokens
        room = Room(limit.num_seqs, budget, float(limit.num_tokens))
        filling = StepFilling(self._pool, room, self._last_step + 1, now)
        self._sharing.fill(filling, now)
        expired += filling.expired
        return _Step(self._last_step + 1, filling.runs, alone=limit.active) if filling.runs else None

    def _expire(self, requests: list[Request], now: float) -> list[Reply]:
        for request in requests:
            self._fail(request, "expired", "the deadline passed while the request waited")
        return self._replies(requests, now)

    def _canary_due(self, now: float) -> bool:
        if self._in_flight:
            return False
        return self._finished_at is None or now - self._finished_at >= self.config.canary_interval_ms / 1000

    # --- outcomes -------------------------------------------------------------------------------------------

    def _finished(self, step: _Step, result: StepResult, arrays: Arrays, now: float) -> None:
        self._finished_at = now
        if step.suspect:
            self._quarantine.clear(step.runs[0].request, step.runs[0].start)
        self._rate.step_finished(step.num_tokens, step.launched_at, now, step.full)
        stats = self._stats
        stats.num_steps += 1
        stats.step_seconds.observe(result.compute_us / 1e6)
        status = read_status(step.num_seqs, arrays)
        clean = not status.any()
        if clean or (status == STATUS_OK).any():
            stats.last_forward = now
        if not step.runs and not clean:
            stats.num_bad_canaries += 1
        row = 0
        for run, offset in zip(step.runs, step.offsets, strict=True):
            num_rows = run.stop - run.start
            if not clean:
                self._check_status(run, status[row : row + num_rows].tolist())
            row += num_rows
            if run.request.failure is not None:
                run.request.drop(run)
                continue
            run.request.complete(run, read_rows(run, offset, arrays), result.compute_us / 1000)
            stats.num_rows += num_rows
        stats.num_tokens += step.num_tokens if step.runs else 0
        self._limit.relax()

    def _check_status(self, run: Run, status: list[int]) -> None:
        for index, code in enumerate(status, run.start):
            if code == STATUS_BAD_TOKEN:
                return self._fail(
                    run.request, "invalid", f"sequence {index} has a token id outside the vocabulary", index
                )
            if code != STATUS_OK:
                return self._fail(
                    run.request, "non_finite", f"the model's output for sequence {index} is not finite", index
                )
        return None

    def _out_of_memory(self, step: _Step, now: float) -> None:
        """Nothing was computed: the rows run again in smaller steps, one at a time; a row that fails alone is out."""
        self._finished_at = now
        self._stats.step_failures["oom"] += 1
        if not step.runs:
            return
        if step.num_seqs == 1 and step.alone:
            for run in step.runs:
                message = (
                    f"sequence {run.start} ({step.num_tokens} tokens) does not fit the device's memory, even alone"
                )
                self._fail(run.request, "out_of_memory", message, run.start)
        self._limit.halve(step.num_seqs, step.num_tokens)
        for run in reversed(step.runs):
            self._return(run, suspect=step.suspect)
            run.request.count_retry()

    # --- deaths ---------------------------------------------------------------------------------------------

    def _return(self, run: Run, suspect: bool) -> None:
        """The run's step came to nothing: its rows are held as suspects, or first in their queue again."""
        request = run.request
        if request.failure is not None:
            request.drop(run)
            return
        self._stats.num_requeued_rows += run.stop - run.start
        if suspect:
            self._suspects.hold_first(run)
        else:
            request.put_back(run)
            self._pool.put_front(request)

    def _blame(self, steps: list[_Step], requests: Iterable[Request], now: float) -> None:
        """Counts one death for each request that was in flight, and a strike for a row that ran alone."""
        for step in steps:
            if step.suspect:
                self._judge(step.runs[0].request, step.runs[0].start, now)
                continue
            for request, start, stop in step.runs:
                for row in range(start, stop):
                    self._quarantine.suspect(request, row, now)
        for request in requests:
            request.count_death()
            if request.attempt > MAX_ATTEMPTS:
                attempts = request.attempt - 1
                self._fail(request, "lost", f"the ranks died in {attempts} attempts", None, RETRY_AFTER_MS)

    def _judge(self, request: Request, row: int, now: float) -> None:
        """The ranks died while `row` ran alone."""
        if self._quarantine.strike(request, row, now) >= MAX_STRIKES:
            self._quarantine.convict(request, row, now)
            self._stats.num_quarantined += 1
            self._fail(request, "quarantined", refusal_message(row), row)

    def _sweep(self, now: float) -> list[Reply]:
        """After news in the quarantine table: the same sequence must not end ranks from within the pool."""
        if self._quarantine.version == self._seen_version:
            return []
        self._seen_version = self._quarantine.version
        found = []
        for request in self._pool:
            row = self._quarantine.match(request, now) if request.failure is None else None
            if row is not None:
                self._fail(request, "quarantined", refusal_message(row), row)
                found.append(request)
        return self._replies(found, now)

    # --- endings --------------------------------------------------------------------------------------------

    def _fail(
        self, request: Request, code: RejectCode, message: str, index: int | None = None, retry_after_ms: int = 0
    ) -> None:
        request.fail(code, message, index, retry_after_ms)
        self._pool.dequeue(request)

    def _close(self, runs: list[Run], now: float) -> list[Reply]:
        return self._replies([run.request for run in runs], now)

    def _replies(self, requests: list[Request], now: float) -> list[Reply]:
        """The terminal replies that are due among `requests`."""
        replies = []
        for request in requests:
            ending = request.terminal(now)
            if ending is not None:
                message, payload = ending
                self._pool.close(request)
                self._stats.requests["ok" if request.failure is None else request.failure.code] += 1
                if request.first_step_at is not None:
                    self._stats.queue_seconds.observe(request.first_step_at - request.arrival)
                replies.append(Reply(request.submit.gateway, message, payload))
        self._publish()
        return replies

    def _publish(self) -> None:
        self._stats.pending_requests = self._pool.num_requests
        self._stats.pending_tokens = self._pool.num_tokens
        self._stats.steps_in_flight = len(self._in_flight)
