"""Sequences that decode by the real planner and a benchmark's ranks: time between tokens, to the first one, of steps.

The benchmark is the scheduler: plans, two steps in flight, real tables, no sockets. What is timed begins once every
sequence decodes and its steps have run often enough to be captured.
"""

import select
import statistics
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from msgspec import Struct

from bench.ranks import ANSWER_S, Answer, Ranks
from ipc.step import StepPlan, StepResult
from ipc.submit import Submit, TokenChunk, TokenDelta
from ipc.types import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.llm.planner import GeneratePlanner
from scheduler.quarantine import Quarantine
from scheduler.request import Request
from scheduler.stats import Stats

WARM_STEPS = 8
NUM_WINDOWS = 3
FAR_NS = 1 << 62


class Measured(Struct):
    """Of sequences that decode side by side."""

    itl_ms: float  # between two tokens of a sequence, on average; median over windows
    step_ms: float
    accepted_length: float  # tokens of a step and sequence
    num_steps: int


class DecodeLoop:
    """Sequences of one model, all begun at once. `draft_length`: of steps of decode rows; 0: none is drafted."""

    def __init__(
        self,
        ranks: Ranks,
        prompts: list[list[int]],
        *,
        max_tokens: int,
        draft_length: int = 0,
        num_in_flight: int = 2,
        num_logprobs: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        ranks.clear()
        self._ranks, self._clock = ranks, clock
        self._stats = Stats("bench/0")
        self._planner = GeneratePlanner(
            ranks.facts, SchedulerConfig(), self._stats, Quarantine(1000), draft_length=lambda num_seqs: draft_length
        )
        self._free = deque(range(len(ranks.slots)))
        self._flying: deque[tuple[StepPlan, Answer]] = deque()
        self._num_in_flight = num_in_flight
        self._num_seqs = len(prompts)
        self.num_tokens = self.num_steps = 0
        self.said: dict[int, list[TokenDelta]] = {}  # by sequence
        self.said_at: dict[int, list[float]] = {}  # by the clock, of every one
        self._ended = 0
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=num_logprobs)
        for chunk_id, prompt in enumerate(prompts):
            submit = Submit(1, 1, chunk_id, [len(prompt)], FAR_NS, sampling=params)
            refusal = self._planner.add(Request.from_submit(submit, np.asarray(prompt, np.int32).tobytes(), 1.0), 1.0)
            assert refusal is None, refusal

    def first_token_ms(self) -> float:
        """Until every sequence has one, from now on."""
        began = self._clock()
        while len(self.said) < self._num_seqs:
            self._turn()
        return (self._clock() - began) * 1e3

    def to_end(self) -> None:
        """Until every sequence has all its tokens."""
        while self._ended < self._num_seqs:
            self._turn()

    def decode(self, num_steps: int) -> Measured:
        """So many steps in each of a few windows. Raises RuntimeError where a sequence ends before."""
        self.first_token_ms()
        self._run(WARM_STEPS)
        spans, windows = [], []
        before_drafts = self.drafts()
        for _ in range(NUM_WINDOWS):
            tokens, began = self.num_tokens, self._clock()
            self._run(num_steps)
            spans.append((self._clock() - began) * 1e3)
            if self._ended:
                raise RuntimeError(f"{self._ended} sequences ended before the measurement did: give them more tokens")
            windows.append(spans[-1] * self._num_seqs / (self.num_tokens - tokens))
        drafts, accepted = (after - before for after, before in zip(self.drafts(), before_drafts, strict=True))
        return Measured(
            itl_ms=statistics.median(windows),
            step_ms=statistics.median(spans) / num_steps,
            accepted_length=1 + accepted / drafts if drafts else 1.0,
            num_steps=NUM_WINDOWS * num_steps,
        )

    def close(self) -> None:
        """Waits for what is in flight."""
        while self._flying:
            self._finish()

    def _run(self, num_steps: int) -> None:
        last = self.num_steps + num_steps
        while self.num_steps < last and not self._ended:
            self._turn()

    def _turn(self) -> None:
        """Launches what may be launched, then waits for the oldest step."""
        while len(self._flying) < self._num_in_flight:
            slot = self._free[0]
            plan, _ = self._planner.plan(1.0, slot, self._ranks.slots[slot])
            if plan is None:
                break
            self._free.popleft()
            self._flying.append((plan, self._ranks.step(plan)))
        self._finish()

    def _finish(self) -> None:
        plan, answer = self._flying.popleft()
        while not answer.ready():
            _wait(answer)
        for reply in self._planner.apply(StepResult(0, plan.step), self._ranks.slots[plan.slot], 1.0):
            message = reply.message
            if not isinstance(message, TokenChunk):
                raise RuntimeError(f"a sequence was refused: {message}")
            for delta in message.deltas:
                self.num_tokens += len(delta.tokens)
                self.said.setdefault(delta.chunk_id, []).append(delta)
                self.said_at.setdefault(delta.chunk_id, []).append(self._clock())
                self._ended += bool(delta.finish_reason)
        self._free.append(plan.slot)
        self.num_steps += 1

    def drafts(self) -> tuple[int, int]:
        """Rows with drafts so far, and the drafts that were right."""
        figures = self._stats.generation
        return (figures.num_drafts, figures.num_accepted_tokens) if figures else (0, 0)


def _wait(answer: Answer) -> None:
    """A rank's threads on a CPU need the core and the interpreter: it says when it is done. A GPU is asked again."""
    if (descriptor := answer.fileno()) >= 0:
        select.select([descriptor], [], [], ANSWER_S)
    else:
        time.sleep(0)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """No two begin alike: the prefix cache has nothing of them."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, vocab_size, (count, length)).tolist()
