"""The planner of language models: continuous batching over paged memory. The contract of a step is ipc/README.md's.

Sequences wait in the pool, run in slots of the ranks' memory, or are held as suspects after a death. Composer decides
what a step holds, Answers what came of it; here sequences come, end, fail and begin again. Knows nothing of sockets,
clocks and epochs.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np
from msgspec.structs import replace

from ipc.step import STATUS_BAD_PARAMS, STATUS_BAD_TOKEN, STATUS_OK, StepFailed, StepPlan, StepResult
from ipc.step_ring import Arrays
from ipc.submit import Rejected, TokenChunk
from ipc.types import MAX_ATTEMPTS, ModelFacts
from scheduler.config import SchedulerConfig
from scheduler.door import RETRY_AFTER_MS, find_refusal
from scheduler.limits import MemoryLimit
from scheduler.llm.answers import Answers, check_answer
from scheduler.llm.canary import write_canary
from scheduler.llm.composer import Composer, DraftLength
from scheduler.llm.door import open_request
from scheduler.llm.draft_lengths import draft_length as facts_draft_length
from scheduler.llm.roster import Roster
from scheduler.llm.sequence import Sequence
from scheduler.llm.tables import NO_LANES, Step, Tables
from scheduler.planner import ABORT_CODES, RANKS_AWAY, Diverged, Reply
from scheduler.quarantine import MAX_STRIKES, Quarantine, refusal_message
from scheduler.request import Request
from scheduler.stats import Stats


class GeneratePlanner:
    """Implements scheduler.planner.Planner. `draft_length`: as in Composer; None: what the model's facts say."""

    def __init__(
        self,
        facts: ModelFacts,
        config: SchedulerConfig,
        stats: Stats,
        quarantine: Quarantine,
        draft_length: DraftLength | None = None,
    ) -> None:
        self._facts = facts
        self.config = config
        self.roster = Roster(facts, config, stats)
        self.residents, self._lanes = self.roster.residents, self.roster.lanes
        self._trials = self.roster.trials
        self._stats = stats
        self._quarantine = quarantine
        self._composer = Composer(facts, config, self.roster, draft_length or partial(facts_draft_length, facts))
        self._answers = Answers(facts, self.residents, self.roster.figures)
        self._limit = MemoryLimit(facts.max_num_seqs, facts.max_num_batched_tokens)
        self._in_flight: dict[int, Step] = {}  # by step number, oldest first
        self._last_step = 0
        self._last_applied = 0
        self._failed = (0, 0)  # a step that ran out of memory, and the last of those that fail with it
        self._finished_at: float | None = None  # when a row last came back; None: a canary is due at once
        self._seen_version = quarantine.version
        self._idle_work = False  # the ranks would make use of an idle step

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @facts.setter
    def facts(self, facts: ModelFacts) -> None:
        self._facts = facts
        self.roster.resize(facts.num_blocks)

    # --- the protocol ---------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Rejected | None:
        refusal = find_refusal(request, self.roster.pool, lambda request: open_request(request, self.facts), now)
        if refusal is None and self._quarantine.match(request, now) is not None:
            refusal = request.rejection("quarantined", refusal_message(0), 0)
        if refusal is not None:
            self._stats.requests[refusal.code] += 1
            return refusal
        self.roster.enter(request, suspect=bool(self._quarantine.suspected(request, now)))
        self.roster.publish(len(self._in_flight))
        return None

    def plan(self, now: float, slot: int, arrays: Arrays) -> tuple[StepPlan | None, list[Reply]]:
        replies = self.roster.expire(now) + self._sweep(now)
        if not self._may_launch():
            return None, replies
        tables = Tables(self._last_step + 1, arrays, self.facts)
        trial = self._trials.next()
        if trial is not None:
            self._composer.compose_trial(tables, trial, self._limit.num_tokens, now)
        else:
            self._composer.compose(tables, self._limit.num_seqs, self._limit.num_tokens, now)
        if tables.num_rows or (self.residents.releases and not self._in_flight):
            plan, step = tables.finish(slot, self._last_applied, self.residents.take_releases(), self._lanes)
            step.trial, step.alone = trial, trial is not None or self._limit.active
            if tables.num_rows:
                self._stats.batch_tokens.observe(step.num_tokens)
                self.roster.figures.num_prefix_hit_tokens += tables.num_hit_tokens
        elif self._in_flight or (planned := self._plan_idle(slot, arrays, now)) is None:
            return None, replies
        else:
            plan, step = planned
        self._last_step = plan.step
        self._in_flight[plan.step] = step
        self.roster.publish(len(self._in_flight))
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
        self.roster.publish(len(self._in_flight))
        return replies

    def abort(self, gateway: int, chunk_id: int | None, reason: str) -> list[Reply]:
        sequences = self.roster.find(gateway, chunk_id)
        if reason == RANKS_AWAY:
            sequences = [sequence for sequence in sequences if self.roster.may_go_elsewhere(sequence)]
        code = ABORT_CODES.get(reason, "aborted")
        message = f"ended before it was done: {reason}"
        outcome = "ok" if reason == "stop" else code  # the gateway has found a stop string
        replies = [self.roster.reject(sequence, code, message, outcome=outcome) for sequence in sequences]
        self.roster.publish(len(self._in_flight))
        return replies

    def lost(self, epoch: int, ordered: bool, now: float) -> list[Reply]:
        trial = self._trials.current
        tried = next((step.trial for step in self._in_flight.values() if step.trial is not None), None)
        flying = self._take_back()
        self._limit.lift()
        self._finished_at, self._idle_work = None, False
        self._last_applied = self._last_step
        suspects = [trial] if trial is not None else []
        if not ordered:
            suspects += [sequence for sequence in flying if sequence is not trial and not sequence.done]
        for sequence in suspects:
            self.roster.pool.dequeue(sequence)
        self._trials.hold_first(suspects)
        replies = [] if ordered else self._blame(flying, tried, now)
        self.roster.publish(len(self._in_flight))
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
        lanes, rows = self._lanes, step.lanes
        lanes.in_flight[rows] -= 1
        lanes.min_new[rows] -= step.samples
        lanes.max_new[rows] -= step.max_new
        self.roster.free(rows[lanes.done[rows]].tolist())

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
            self.roster.end(sequence, "ok")
        replies = [self._fail_row(sequence, status) for sequence, status in taken.failed]
        if step.trial is not None and (step.trial.done or step.num_decodes):
            self._quarantine.clear(step.trial.request, 0)
            self._trials.end(step.trial)
        self._limit.relax()
        return replies + [Reply(gateway, TokenChunk(gateway, deltas)) for gateway, deltas in taken.deltas.items()]

    def _fail_row(self, sequence: Sequence, status: int) -> Reply:
        if status == STATUS_BAD_TOKEN:
            message = f"the prompt has a token id outside the vocabulary of {self.facts.vocab_size}"
            return self.roster.reject(sequence, "invalid", message, 0)
        if status == STATUS_BAD_PARAMS:
            what = "sampling parameters" if sequence.params.grammar is None else "grammar or the sampling parameters"
            message = f"this model cannot follow the {what} asked for: ask for something simpler"
            return self.roster.reject(sequence, "invalid", message)
        return self.roster.reject(sequence, "non_finite", "the model's output is not finite", 0)

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
        for lane in step.lanes[~self._lanes.done[step.lanes]].tolist():
            sequence = self._lanes.at(lane)
            sequence.request.count_retry()
            if step.alone and step.num_rows == 1 and step.num_tokens <= self.facts.block_size:
                message = f"{len(sequence.ids)} tokens do not fit the device's memory, even alone"
                replies.append(self.roster.reject(sequence, "out_of_memory", message, 0))
        return replies

    def _rewind(self, step: Step) -> None:
        """Its prefill rows computed nothing: their sequences go on from where they began."""
        for row, generation in zip(step.prefills, step.generations[step.num_decodes :].tolist(), strict=True):
            sequence = row.sequence
            if self._lanes.generation[sequence.lane] == generation and sequence.slot >= 0:
                sequence.num_computed = min(sequence.num_computed, row.start)
                self._lanes.decoding[sequence.lane] = False

    # --- deaths ---------------------------------------------------------------------------------------------

    def _take_back(self) -> list[Sequence]:
        """Nobody is in a slot or in flight any more; returns those that were in flight, the oldest first.

        Those that have ended meanwhile are among them: their rows ran all the same.
        """
        lanes = self._lanes
        steps, self._in_flight = list(self._in_flight.values()), {}
        for sequence in reversed(self.residents.running):  # each goes to the front, so the first last
            self.residents.leave(sequence)
            self.roster.pool.put_front(sequence)
        self.residents.forget_memory(self.facts.num_blocks)
        flying = []
        for lane in sorted({lane for step in steps for lane in step.lanes.tolist()}):
            lanes.in_flight[lane] = lanes.min_new[lane] = lanes.max_new[lane] = 0
            flying.append(lanes.at(lane))
            self.roster.free([lane])
        self._stats.num_requeued_rows += sum(not sequence.done for sequence in flying)
        return sorted(flying, key=lambda sequence: sequence.order[1])

    def _blame(self, flying: Iterable[Sequence], tried: Sequence | None, now: float) -> list[Reply]:
        """Counts one death for each that was in flight, and a strike for the one `tried` alone, though it have ended:
        a client that gives up before the ranks do must not end the next ones as well."""
        replies = []
        for sequence in flying:
            request = sequence.request
            if sequence is not tried:
                self._quarantine.suspect(request, 0, now)
            elif self._quarantine.strike(request, 0, now) >= MAX_STRIKES:
                self._quarantine.convict(request, 0, now)
                self._stats.num_quarantined += 1
                if not sequence.done:
                    replies.append(self.roster.reject(sequence, "quarantined", refusal_message(0), 0))
            if sequence.done:
                continue
            request.count_death()
            if request.attempt > MAX_ATTEMPTS:
                message = f"the ranks died in {request.attempt - 1} attempts"
                replies.append(self.roster.reject(sequence, "lost", message, None, RETRY_AFTER_MS))
        return replies

    def _sweep(self, now: float) -> list[Reply]:
        """After news in the quarantine table: the same prompt must not end ranks from within the pool."""
        if self._quarantine.version == self._seen_version:
            return []
        self._seen_version = self._quarantine.version
        found = [each for each in self.roster.pool if self._quarantine.match(each.request, now) is not None]
        return [self.roster.reject(sequence, "quarantined", refusal_message(0), 0) for sequence in found]
