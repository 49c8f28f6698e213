"""A planner and a runner in one process, two steps in flight: real plans, real tables, a real model, no sockets."""

import random
import select
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ipc.step import StepFailed, StepPlan, StepResult
from ipc.step_ring import Arrays, generate_layout, local_slots
from ipc.submit import Submit, TokenChunk, TokenDelta
from ipc.types import SamplingParams
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


@dataclass
class Answer:
    """What one job got. `end`: its finish reason, or the code it was rejected with."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    end: str = ""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def same(self, other: "Answer") -> bool:
        """Tokens and end; log probabilities up to rounding, which depends on how many rows are computed together."""
        return (
            (self.tokens, self.end) == (other.tokens, other.end)
            and len(self.logprobs) == len(other.logprobs)
            and np.allclose(self.logprobs, other.logprobs, atol=1e-4)
        )


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
        return [self.answers[chunk_id] for chunk_id in range(len(jobs))]

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
        answer.top_ids += [[token for token, _ in each] for each in delta.top_logprobs]
        if delta.finish_reason:
            answer.end = delta.finish_reason
        elif len(answer.tokens) >= self.aborts.get(delta.chunk_id, 1 << 30):
            self._take(self.planner.abort(1, delta.chunk_id, "disconnect"))
