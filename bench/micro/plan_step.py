"""What the scheduler's own work for a decode step costs: planning it and applying its answer, without ranks.

    python -m bench.micro.plan_step [--num-seqs 128] [--draft-length 0] [--steps 2000]

Prints medians and 99th percentiles in microseconds of one process on this machine. Every sequence is greedy, asks for
no logprobs and never ends; sequences have prompts of different lengths, as under real load, so that about one row in
sixteen needs a new block in each step. One step is always in flight besides the one planned.
"""

import argparse
import random
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ipc.codec import encode
from ipc.step import StepPlan, StepResult
from ipc.step_ring import Arrays, generate_layout, local_slots
from ipc.submit import Submit
from ipc.types import ModelFacts, SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.llm.planner import GeneratePlanner
from scheduler.planner import Reply
from scheduler.quarantine import Quarantine
from scheduler.request import Request
from scheduler.stats import Stats

WARM_UP = 50


def facts_for(num_seqs: int, draft_length: int) -> ModelFacts:
    return ModelFacts(
        name="bench",
        architecture="bench",
        task="generate",
        vocab_size=128_256,
        max_model_len=32_768,
        dimension=1,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        num_blocks=num_seqs * 2048,
        max_draft_tokens=draft_length,
        eos_token_ids=(2, 3),
    )


class Ranks:
    """Answers every row with as many tokens as it may give; slots are the lengths that a rank would know."""

    def __init__(self, facts: ModelFacts) -> None:
        self.lengths = np.zeros(facts.max_num_seqs, np.int64)

    def answer(self, plan: StepPlan, arrays: Arrays) -> StepResult:
        rows = np.asarray(arrays["rows"][: plan.num_seqs], np.int64)
        slots, prefill = rows[:, 0], rows[:, 3] == 0
        counts = np.where(prefill, rows[:, 4], rows[:, 6] + 1)
        self.lengths[slots] = np.where(prefill, rows[:, 7], self.lengths[slots]) + counts
        arrays["status"][: plan.num_seqs] = 0
        arrays["num_tokens"][: plan.num_seqs] = counts
        arrays["num_drafts"][: plan.num_seqs] = rows[:, 6]
        arrays["lengths"][: plan.num_seqs] = self.lengths[slots]
        arrays["tokens"][: plan.num_seqs] = 7
        return StepResult(0, plan.step, 1000)


class Bench:
    def __init__(self, num_seqs: int, draft_length: int) -> None:
        self.facts = facts_for(num_seqs, draft_length)
        config = SchedulerConfig()
        quarantine = Quarantine(config.quarantine_ttl_ms)
        self.planner = GeneratePlanner(self.facts, config, Stats("bench/0"), quarantine, lambda _: draft_length)
        self.ranks = Ranks(self.facts)
        self.slots = local_slots(generate_layout(self.facts))
        self.free = deque(range(len(self.slots)))
        self.flying: deque[StepPlan] = deque()
        self.num_rows = 0

    def submit(self, num_seqs: int) -> None:
        draw = random.Random(1)
        for chunk_id in range(num_seqs):
            ids = np.array([draw.randrange(4, 1000) for _ in range(draw.randint(100, 200))], np.int32)
            params = SamplingParams(max_tokens=32_000, temperature=0.0)
            submit = Submit(1, 1, chunk_id, [len(ids)], timeout_ms=10**9, sampling=params)
            assert self.planner.add(Request.from_submit(submit, ids.tobytes(), 0.0), 0.0) is None

    def plan(self, now: float) -> None:
        slot = self.free[0]
        plan, _ = self.planner.plan(now, slot, self.slots[slot])
        assert plan is not None
        self.free.popleft()
        self.flying.append(plan)
        self.num_rows = plan.num_seqs

    def apply(self, now: float) -> list[Reply]:
        plan = self.flying.popleft()
        self.free.append(plan.slot)
        return self.planner.apply(StepResult(0, plan.step, 1000), self.slots[plan.slot], now)

    def run(self, num_steps: int) -> dict[str, list[float]]:
        """Microseconds of each step's plan, apply, and encoding of the messages to gateways."""
        spent: dict[str, list[float]] = {"plan": [], "apply": [], "encode": []}
        self.plan(1.0)
        for step in range(WARM_UP + num_steps):
            now = 1.0 + step * 0.01
            _timed(spent["plan"], lambda: self.plan(now))  # noqa: B023 - called at once
            self.ranks.answer(self.flying[0], self.slots[self.flying[0].slot])
            replies = _timed(spent["apply"], lambda: self.apply(now))  # noqa: B023
            _timed(spent["encode"], lambda: [encode(reply.message) for reply in replies])  # noqa: B023
        return {name: values[WARM_UP:] for name, values in spent.items()}


def _timed(into: list[float], work: "Callable[[], list[Reply] | None]") -> list[Reply]:
    start = time.perf_counter()
    found = work()
    into.append((time.perf_counter() - start) * 1e6)
    return found or []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=128)
    parser.add_argument("--draft-length", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    bench = Bench(options.num_seqs, options.draft_length)
    bench.submit(options.num_seqs)
    spent = bench.run(options.steps)
    assert bench.num_rows == options.num_seqs
    print(f"{options.num_seqs} sequences, {options.draft_length} drafts, {options.steps} steps; us a step")
    for name, values in spent.items():
        middle, high = np.percentile(values, [50, 99])
        print(f"{name:8} median {middle:7.1f}   99 % {high:7.1f}")


if __name__ == "__main__":
    main()
