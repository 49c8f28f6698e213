"""A planner and a runner in one process, two steps in flight: real plans, real tables, a real model, no sockets."""

import random
import select
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ipc.step import StepFailed, StepPlan, StepResult
from ipc.step_ring import Arrays, generate_layout, local_slots
from ipc.submit import Submit, TokenChunk, TokenDelta
from ipc.types import SamplingParams
from rose.host_slots import EMPTY
from rose.model_runner import ModelRunner
from rose.runner import LazyTensor, OutOfMemory
from scheduler.config import SchedulerConfig
from scheduler.llm.figures import Figures
from scheduler.llm.planner import GeneratePlanner
from scheduler.planner import Reply
from scheduler.quarantine import Quarantine
from scheduler.request import Request
from scheduler.stats import Stats

Jobs = list[tuple[list[int], SamplingParams]]
Tops = list[list[tuple[int, float]]]  # ids and log probabilities


@dataclass
class Answer:
    """What one job got. `end`: its finish reason, or the code it was rejected with."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: Tops = field(default_factory=list)  # for each token, the most probable first
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top: Tops = field(default_factory=list)
    end: str = ""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def same(self, other: "Answer") -> bool:
        """Tokens, end, whose log probabilities; these up to rounding, which depends on how many rows are computed
        together."""
        return self._told() == other._told() and np.allclose(self._values(), other._values(), atol=1e-4)

    def _told(self) -> tuple[object, ...]:
        """What is the same to the bit: ids, and how many values there are of each kind."""
        ids = [[[token for token, _ in each] for each in tops] for tops in (self.top, self.prompt_top)]
        return self.tokens, self.end, len(self.logprobs), len(self.prompt_logprobs), ids

    def _values(self) -> list[float]:
        tops = [value for each in (*self.top, *self.prompt_top) for _, value in each]
        return [*self.logprobs, *self.prompt_logprobs, *tops]


class Replica:
    """`slots`: of a ring that the runner knows. `aborts`: jobs that are given up once they have so many tokens."""

    def __init__(self, runner: ModelRunner, slots: list[Arrays] | None = None, **planner: Any) -> None:
        if slots is None:
            runner.attach(None)
        self.runner = runner
        self.stats = Stats("tiny/0")
        self.planner = GeneratePlanner(runner.facts, SchedulerConfig(), self.stats, Quarantine(1000), **planner)
        self.slots = slots or local_slots(generate_layout(runner.facts))
        self.free = deque(range(len(self.slots)))
        self.flying: deque[tuple[StepPlan, LazyTensor]] = deque()
        self.answers: dict[int, Answer] = {}
        self.aborts: dict[int, int] = {}
        self.num_steps = 0
        self.draft_lengths: set[int] = set()  # of steps

    @property
    def figures(self) -> Figures:
        assert self.stats.generation is not None
        return self.stats.generation

    def run(
        self, jobs: Jobs, arrivals: random.Random, aborts: dict[int, int] | None = None, arrival: float = 0.3
    ) -> list[Answer]:
        """Every job to its end; between two steps one comes with the chance `arrival`, and then perhaps another."""
        self.aborts = dict(aborts or {})
        waiting = deque(enumerate(jobs))
        while waiting or self.flying or self.stats.pending_requests:
            while waiting and arrivals.random() < arrival:
                chunk_id, (prompt, params) = waiting.popleft()
                self.answers[chunk_id] = Answer()
                submit = Submit(1, 1, chunk_id, [len(prompt)], 10**9, sampling=params)
                frame = np.asarray(prompt, np.int32).tobytes()
                assert self.planner.add(Request.from_submit(submit, frame, 1.0), 1.0) is None
            while self._launch():
                pass
            if self.flying:
                self._finish()
            self.check_memory()
        return [self.answers[chunk_id] for chunk_id in range(len(jobs))]

    def check_memory(self) -> None:
        """Every block is free or held by as many as have it, and nobody has more than steps in flight may write to."""
        residents, facts = self.planner.residents, self.runner.facts
        held = Counter(block for sequence in residents.running for block in sequence.blocks)
        assert residents.blocks.num_holders == [held[block] for block in range(facts.num_blocks)]
        assert residents.blocks.num_free == facts.num_blocks - len(held)
        ahead = (facts.max_draft_tokens + 1) * facts.num_steps_in_flight
        for sequence in residents.running:
            most = min(len(sequence.ids) + ahead, sequence.limit)
            assert len(sequence.blocks) <= residents.num_blocks_for(most), f"{len(sequence.ids)} tokens"

    def check_nothing_left(self) -> None:
        """After `run`: every block, slot and lane is free, at the planner and in the rank's own state."""
        while self._launch():  # releases of the last sequences
            self._finish()
        self.check_memory()
        planner, facts = self.planner, self.runner.facts
        assert planner.residents.blocks.num_free == facts.num_blocks
        assert sorted(planner.residents.free_slots) == list(range(facts.max_num_seqs))
        assert planner.roster.lanes.num_used == 0
        rank = self.runner.device._decoder._residents  # type: ignore[attr-defined]
        assert (rank.host.generation == EMPTY).all()
        assert (rank.slots.block_table == rank.slots.dummy_block).all()
        assert not rank.slots.num_tokens[: facts.max_num_seqs].any()

    def _launch(self) -> bool:
        plan, replies = self.planner.plan(1.0, self.free[0], self.slots[self.free[0]])
        self._take(replies)
        if plan is not None:
            self.flying.append((plan, self.runner.step(plan, self.slots[self.free.popleft()])))
            self.num_steps += 1
            self.draft_lengths.add(plan.draft_length)
        return plan is not None

    def _finish(self) -> None:
        plan, lazy = self.flying.popleft()
        result: StepResult | StepFailed = StepResult(0, plan.step)
        try:
            while not lazy.ready():
                select.select([lazy.fileno()], [], [], 1.0)
        except OutOfMemory as error:
            result = StepFailed(0, plan.step, "oom", str(error))
        self._take(self.planner.apply(result, self.slots[plan.slot], 1.0))
        self.free.append(plan.slot)

    def _take(self, replies: list[Reply]) -> None:
        for reply in replies:
            if not isinstance(reply.message, TokenChunk):
                self.answers[reply.message.chunk_id].end = reply.message.code  # type: ignore[union-attr]
                continue
            for delta in reply.message.deltas:
                self._take_delta(self.answers[delta.chunk_id], delta)

    def _take_delta(self, answer: Answer, delta: TokenDelta) -> None:
        assert not answer.end, "tokens after the end"
        answer.tokens += delta.tokens
        answer.num_draft_tokens += delta.num_draft_tokens
        answer.num_accepted_tokens += delta.num_accepted_tokens
        answer.logprobs += delta.logprobs
        answer.top += delta.top_logprobs
        answer.prompt_logprobs += delta.prompt_logprobs
        answer.prompt_top += delta.prompt_top_logprobs
        if delta.finish_reason:
            answer.end = delta.finish_reason
        elif len(answer.tokens) >= self.aborts.get(delta.chunk_id, 1 << 30):
            self._take(self.planner.abort(1, delta.chunk_id, "disconnect"))
