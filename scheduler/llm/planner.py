"""The planner of language models: continuous batching over paged memory. The contract of a step is ipc/README.md's.

Sequences wait in the pool, run in slots of the ranks' memory, or are held as suspects after a death. Composer decides
what a step holds, Answers what came of it; here sequences come, end, fail and begin again. Knows nothing of sockets,
clocks and epochs.
"""

from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace

from ipc.step import STATUS_BAD_TOKEN, STATUS_OK, StepFailed, StepPlan, StepResult
from ipc.step_ring import Arrays
from ipc.submit import RejectCode, Rejected, TokenChunk
from ipc.types import MAX_ATTEMPTS, ModelFacts
from scheduler.config import SchedulerConfig
from scheduler.door import RETRY_AFTER_MS, find_refusal
from scheduler.limits import MemoryLimit
from scheduler.llm.answers import Answers, check_answer
from scheduler.llm.canary import write_canary
from scheduler.llm.composer import Composer, DraftLength
from scheduler.llm.deadlines import Deadlines
from scheduler.llm.door import open_request
from scheduler.llm.figures import Figures
from scheduler.llm.lanes import Lanes
from scheduler.llm.memory import Memory
from scheduler.llm.residents import Residents
from scheduler.llm.sequence import Sequence
from scheduler.llm.tables import NO_LANES, Step, Tables
from scheduler.llm.trials import Trials
from scheduler.planner import ABORT_CODES, RANKS_AWAY, Diverged, Reply
from scheduler.pool import Pool
from scheduler.quarantine import MAX_STRIKES, Quarantine, refusal_message
from scheduler.request import Request
from scheduler.sharing import Sharing
from scheduler.stats import Stats


def no_drafts(num_seqs: int) -> int:
    return 0


class GeneratePlanner:
    """Implements scheduler.planner.Planner."""

    def __init__(
        self,
        facts: ModelFacts,
        config: SchedulerConfig,
        stats: Stats,
        quarantine: Quarantine,
        draft_length: DraftLength = no_drafts,
    ) -> None:
        self.facts = facts
        self.config = config
        self.lanes = Lanes()
        self.residents = Residents(facts, self.lanes, config.prefix_cache)
        self.pool: Pool[Sequence] = Pool(config.max_pending_requests, config.max_pending_tokens)
        self._stats = stats
        self._figures = stats.generation = stats.generation or Figures()
        self._quarantine = quarantine
        self._memory = Memory(self.residents, self.pool, facts.max_num_seqs, config.bulk_share)
        sharing = Sharing(config.bulk_share, config.bulk_wait_ms)
        self._composer = Composer(facts, self.residents, self._memory, self.pool, sharing, draft_length)
        self._answers = Answers(facts, self.residents, self._figures)
        self._deadlines = Deadlines()
        self._trials = Trials()
        self._limit = MemoryLimit(facts.max_num_seqs, facts.max_num_batched_tokens)
        self._in_flight: dict[int, Step] = {}  # by step number, oldest first
        self._arrivals = 0
        self._last_step = 0
        self._last_applied = 0
        self._failed = (0, 0)  # a step that ran out of memory, and the last of those that fail with it
        self._finished_at: float | None = None  # when a row last came back; None: a canary is due at once
        self._seen_version = quarantine.version
        self._idle_work = False  # the ranks would make use of an idle step

    # --- the protocol ---------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Rejected | None:
        refusal = find_refusal(request, self.pool, lambda request: open_request(request, self.facts), now)
        if refusal is None and self._quarantine.match(request, now) is not None:
            refusal = request.rejection("quarantined", refusal_message(0), 0)
        if refusal is not None:
            self._stats.requests[refusal.code] += 1
            return refusal
        self._arrivals += 1
        sequence = Sequence.from_request(request, self._arrivals)
        self.lanes.add(sequence)
        if self._quarantine.suspected(request, now):
            self._trials.hold(sequence)
        self.pool.add(sequence)
        self._deadlines.add(sequence, self.pool.num_requests)
        self._publish()
        return None

    def plan(self, now: float, slot: int, arrays: Arrays) -> tuple[StepPlan | None, list[Reply]]:
        replies = self._expire(now) + self._sweep(now)
        if not self._may_launch():
            return None, replies
        tables = Tables(self._last_step + 1, arrays, self.facts)
        trial = self._trials.next()
        if trial is not None:
            self._composer.compose_trial(tables, trial, self._limit.num_tokens, now)
        else:
            self._composer.compose(tables, self._limit.num_seqs, self._limit.num_tokens, now)
        if tables.num_rows or (self.residents.releases and not self._in_flight):
            plan, step = tables.finish(slot, self._last_applied, self.residents.take_releases(), self.lanes)
            step.trial, step.alone = trial, trial is not None or self._limit.active
            if tables.num_rows:
                self._stats.batch_tokens.observe(step.num_tokens)
        elif self._in_flight or (planned := self._plan_idle(slot, arrays, now)) is None:
            return None, replies
        else:
            plan, step = planned
        self._last_step = plan.step
        self._in_flight[plan.step] = step
        self._publish()
        return plan, replies

    def apply(self, result: StepResult | StepFailed, arrays: Arrays, now: float) -> list[Reply]:
        if isinstance(result, StepFailed) and result.kind == "fatal":
            return self.lost(result.epoch, ordered=False, now=now)
        step = self._in_flight.get(result.step)
        if step is None:
            self._stats.stale["rank"] += 1
            return []
        if isinstance(result, StepResult):  # a failure may be told before the result of an older step
            if step.step != next(iter(self._in_flight)):
                raise Diverged(f"step {step.step} was answered before step {next(iter(self._in_flight))}")
            check_answer(step, arrays, self.residents)
        del self._in_flight[step.step]
        self._last_applied = max(self._last_applied, step.step)
        self._retire(step)
        if isinstance(result, StepFailed):
            replies = self._out_of_memory(step, now)
        else:
            self._idle_work = result.idle_work
            replies = self._finished(step, result, arrays, now)
        self._publish()
        return replies

    def abort(self, gateway: int, chunk_id: int | None, reason: str) -> list[Reply]:
        if chunk_id is None:
            sequences = self.pool.of_gateway(gateway)
        else:
            found = self.pool.find(gateway, chunk_id)
            sequences = [] if found is None else [found]
        if reason == RANKS_AWAY:  # no other replica could go on with what has streamed
            sequences = [each for each in sequences if self._only_waits(each) and len(each.ids) == each.num_prompt]
        code = ABORT_CODES.get(reason, "aborted")
        replies = [self._reject(sequence, code, f"ended before it was done: {reason}") for sequence in sequences]
        self._publish()
        return replies

    def lost(self, epoch: int, ordered: bool, now: float) -> list[Reply]:
        trial = self._trials.current
        flying = self._take_back()
        self._limit.lift()
        self._finished_at, self._idle_work = None, False
        self._last_applied = self._last_step
        suspects = [trial] if trial is not None else []
        if not ordered:
            suspects += [sequence for sequence in flying if sequence is not trial]
        for sequence in suspects:
            self.pool.dequeue(sequence)
        self._trials.hold_first(suspects)
        replies = [] if ordered else self._blame(flying, trial, now)
        self._publish()
        return replies

    # --- steps ----------------------------------------------------------------------------------------------

    def _may_launch(self) -> bool:
        if any(step.alone for step in self._in_flight.values()):
            return False
        exclusive = self._trials or self._limit.active
        return len(self._in_flight) < (1 if exclusive else self.facts.num_steps_in_flight)

    def _plan_idle(self, slot: int, arrays: Arrays, now: float) -> tuple[StepPlan, Step] | None:
        """Nothing is in flight and nobody wants a row: a canary where one is due, or a step of the ranks' own."""
        number = self._last_step + 1
        step = Step(number, NO_LANES, NO_LANES, NO_LANES.astype(np.bool_), NO_LANES, [])
        waited = self._finished_at is None or now - self._finished_at >= self.config.canary_interval_ms / 1000
        place = self.residents.borrow() if waited else None
        if place is not None:
            write_canary(arrays, *place)
            step.canary, step.num_tokens = True, 1
            self._stats.num_canaries += 1
            plan = StepPlan(0, number, slot, "generate", 1, 1, canary=True, num_admissions=1, num_new_blocks=1)
        elif self._idle_work:
            plan = StepPlan(0, number, slot, "idle", canary=True)
        else:
            return None
        return replace(plan, last_applied=self._last_applied), step

    def _retire(self, step: Step) -> None:
        """The step's rows are in flight no longer."""
        lanes, rows = self.lanes, step.lanes
        lanes.in_flight[rows] -= 1
        lanes.min_new[rows] -= step.samples
        lanes.max_new[rows] -= step.max_new
        for lane in rows[lanes.done[rows] & (lanes.in_flight[rows] == 0)].tolist():
            lanes.remove(lane)

    def _finished(self, step: Step, result: StepResult, arrays: Arrays, now: float) -> list[Reply]:
        stats = self._stats
        stats.num_steps += 1
        stats.step_seconds.observe(result.compute_us / 1e6)
        if step.canary or step.num_rows:
            self._finished_at = now
            good = bool((arrays["status"][: max(step.num_rows, 1)] == STATUS_OK).any())
            stats.last_forward = now if good else stats.last_forward
            stats.num_bad_canaries += step.canary and not good
        if not step.num_rows:
            return []
        stats.num_tokens += step.num_tokens
        taken = self._answers.take(step, arrays, result.compute_us, now)
        for sequence in taken.ended:
            stats.num_rows += 1
            self._end(sequence, "ok")
        replies = [self._fail_row(sequence, status) for sequence, status in taken.failed]
        if step.trial is not None and (step.trial.done or step.num_decodes):
            self._quarantine.clear(step.trial.request, 0)
            self._trials.end(step.trial)
        self._limit.relax()
        return replies + [Reply(gateway, TokenChunk(gateway, deltas)) for gateway, deltas in taken.deltas.items()]

    def _fail_row(self, sequence: Sequence, status: int) -> Reply:
        if status == STATUS_BAD_TOKEN:
            message = f"the prompt has a token id outside the vocabulary of {self.facts.vocab_size}"
            return self._reject(sequence, "invalid", message, 0)
        return self._reject(sequence, "non_finite", "the model's output is not finite", 0)

    # --- out of memory --------------------------------------------------------------------------------------

    def _out_of_memory(self, step: Step, now: float) -> list[Reply]:
        """Nothing was computed: the rows run again in smaller steps, one at a time; what fails alone is out."""
        self._stats.step_failures["oom"] += 1
        self._finished_at = now
        if self._failed[0] < step.step <= self._failed[1]:
            return []  # it was planned on top of one that failed
        self._failed = (step.step, self._last_step)
        self._rewind(step)
        for later in self._in_flight.values():
            if later.step > step.step:
                self._rewind(later)
        if not step.num_rows:
            return []
        self._limit.halve(step.num_rows, step.num_tokens)
        replies = []
        for lane in step.lanes[~self.lanes.done[step.lanes]].tolist():
            sequence = self.lanes.at(lane)
            sequence.request.count_retry()
            if step.alone and step.num_rows == 1 and step.num_tokens <= self.facts.block_size:
                message = f"{len(sequence.ids)} tokens do not fit the device's memory, even alone"
                replies.append(self._reject(sequence, "out_of_memory", message, 0))
        return replies

    def _rewind(self, step: Step) -> None:
        """Its prefill rows computed nothing: their sequences go on from where they began."""
        for row, generation in zip(step.prefills, step.generations[step.num_decodes :].tolist(), strict=True):
            sequence = row.sequence
            if self.lanes.generation[sequence.lane] == generation and sequence.slot >= 0:
                sequence.num_computed = min(sequence.num_computed, row.start)
                self.lanes.decoding[sequence.lane] = False

    # --- deaths ---------------------------------------------------------------------------------------------

    def _take_back(self) -> list[Sequence]:
        """Nobody is in a slot or in flight any more; returns those that were in flight, the oldest first."""
        lanes = self.lanes
        steps, self._in_flight = list(self._in_flight.values()), {}
        for sequence in reversed(self.residents.running):  # each goes to the front, so the first last
            self.residents.leave(sequence)
            self.pool.put_front(sequence)
        self.residents.forget_memory()
        flying = []
        for lane in sorted({lane for step in steps for lane in step.lanes.tolist()}):
            lanes.in_flight[lane] = lanes.min_new[lane] = lanes.max_new[lane] = 0
            if lanes.done[lane]:
                lanes.remove(lane)
            else:
                flying.append(lanes.at(lane))
        self._stats.num_requeued_rows += len(flying)
        return sorted(flying, key=lambda sequence: sequence.order[1])

    def _blame(self, flying: Iterable[Sequence], trial: Sequence | None, now: float) -> list[Reply]:
        """Counts one death for each that was in flight, and a strike for one that ran alone."""
        replies = []
        for sequence in flying:
            request = sequence.request
            request.count_death()
            if sequence is not trial:
                self._quarantine.suspect(request, 0, now)
            elif self._quarantine.strike(request, 0, now) >= MAX_STRIKES:
                self._quarantine.convict(request, 0, now)
                self._stats.num_quarantined += 1
                replies.append(self._reject(sequence, "quarantined", refusal_message(0), 0))
                continue
            if request.attempt > MAX_ATTEMPTS:
                message = f"the ranks died in {request.attempt - 1} attempts"
                replies.append(self._reject(sequence, "lost", message, None, RETRY_AFTER_MS))
        return replies

    def _sweep(self, now: float) -> list[Reply]:
        """After news in the quarantine table: the same prompt must not end ranks from within the pool."""
        if self._quarantine.version == self._seen_version:
            return []
        self._seen_version = self._quarantine.version
        found = [each for each in self.pool if self._quarantine.match(each.request, now) is not None]
        return [self._reject(sequence, "quarantined", refusal_message(0), 0) for sequence in found]

    # --- endings --------------------------------------------------------------------------------------------

    def _only_waits(self, sequence: Sequence) -> bool:
        waits = sequence.slot < 0 and not sequence.held and sequence is not self._trials.current
        return waits and not self.lanes.in_flight[sequence.lane]

    def _expire(self, now: float) -> list[Reply]:
        passed = self._deadlines.pop(now)
        return [self._reject(each, "expired", "the deadline passed before the generation ended") for each in passed]

    def _reject(
        self, sequence: Sequence, code: RejectCode, message: str, index: int | None = None, retry_after_ms: int = 0
    ) -> Reply:
        self._end(sequence, code)
        return Reply(sequence.gateway, sequence.request.rejection(code, message, index, retry_after_ms))

    def _end(self, sequence: Sequence, outcome: str) -> None:
        """No further step will contain it; rows in flight are dropped when they come back."""
        lanes, lane, request = self.lanes, sequence.lane, sequence.request
        sequence.done = lanes.done[lane] = True
        if sequence.slot >= 0:
            self.residents.leave(sequence)
        self._trials.end(sequence)
        self.pool.close(sequence)
        if not lanes.in_flight[lane]:
            lanes.remove(lane)
        self._stats.requests[outcome] += 1
        if request.first_step_at is not None:
            self._stats.queue_seconds.observe(request.first_step_at - request.arrival)

    def _publish(self) -> None:
        stats, figures, residents = self._stats, self._figures, self.residents
        stats.pending_requests = self.pool.num_requests
        stats.pending_tokens = self.pool.num_tokens
        stats.steps_in_flight = len(self._in_flight)
        figures.running_sequences = len(residents.running)
        figures.waiting_sequences = self.pool.num_requests - len(residents.running)
        figures.blocks = residents.blocks.num_blocks
        figures.blocks_used = residents.blocks.num_blocks - residents.blocks.num_free
        figures.blocks_cached = residents.blocks.num_cached
        figures.num_prefix_hit_tokens = residents.num_hit_tokens
        figures.num_preemptions = self._memory.num_preemptions
