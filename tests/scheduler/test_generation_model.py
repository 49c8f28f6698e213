"""The planner over a real model on CPU: company, cache and preemption change no token of anybody."""

import random
import select
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from ipc.step import StepPlan, StepResult
from ipc.step_ring import generate_layout, local_slots
from ipc.submit import Submit, TokenChunk
from ipc.types import SamplingParams
from rose.config import RankConfig
from rose.decoder_loader import DecoderLoader
from rose.model_runner import ModelRunner
from rose.runner import LazyTensor
from scheduler.config import SchedulerConfig
from scheduler.llm.planner import GeneratePlanner
from scheduler.planner import Reply
from scheduler.quarantine import Quarantine
from scheduler.request import Request
from scheduler.stats import Stats
from tests.rose.tiny_lm import write_llama

Jobs = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    directory = write_llama(tmp_path_factory.mktemp("model"), tokenizer=True)
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 112}
    config = RankConfig(device="cpu", dtype="float32", num_threads=1, kv_cache_bytes=200_000, **limits)
    made = ModelRunner(DecoderLoader("tiny", directory, config))
    made.load()
    yield made
    made.close()


class Replica:
    """A planner and a runner in one process, two steps in flight."""

    def __init__(self, runner: ModelRunner) -> None:
        runner.attach(None)
        self.runner = runner
        self.stats = Stats("tiny/0")
        self.planner = GeneratePlanner(runner.facts, SchedulerConfig(), self.stats, Quarantine(1000))
        self.slots = local_slots(generate_layout(runner.facts))
        self.free = deque(range(len(self.slots)))
        self.flying: deque[tuple[StepPlan, LazyTensor]] = deque()
        self.tokens: dict[int, list[int]] = {}

    def run(self, jobs: Jobs, arrivals: random.Random) -> list[list[int]]:
        waiting = deque(enumerate(jobs))
        while waiting or self.flying or self.stats.pending_requests:
            while waiting and arrivals.random() < 0.3:
                chunk_id, (prompt, params) = waiting.popleft()
                submit = Submit(1, 1, chunk_id, [len(prompt)], 10**9, sampling=params)
                frame = np.asarray(prompt, np.int32).tobytes()
                assert self.planner.add(Request.from_submit(submit, frame, 1.0), 1.0) is None
            while self._launch():
                pass
            if self.flying:
                self._finish()
        return [self.tokens[chunk_id] for chunk_id in range(len(jobs))]

    def _launch(self) -> bool:
        plan, replies = self.planner.plan(1.0, self.free[0], self.slots[self.free[0]])
        self._take(replies)
        if plan is not None:
            self.flying.append((plan, self.runner.step(plan, self.slots[self.free.popleft()])))
        return plan is not None

    def _finish(self) -> None:
        plan, lazy = self.flying.popleft()
        while not lazy.ready():
            select.select([lazy.fileno()], [], [], 1.0)
        self._take(self.planner.apply(StepResult(0, plan.step), self.slots[plan.slot], 1.0))
        self.free.append(plan.slot)

    def _take(self, replies: list[Reply]) -> None:
        for reply in replies:
            assert isinstance(reply.message, TokenChunk), reply.message
            for delta in reply.message.deltas:
                self.tokens.setdefault(delta.chunk_id, []).extend(delta.tokens)


def test_company_cache_and_preemption_change_no_token(runner: ModelRunner) -> None:
    draw = random.Random(3)
    base = [draw.randrange(5, runner.facts.vocab_size) for _ in range(60)]
    jobs: Jobs = []
    for seed in range(8):
        prompt = base[: draw.randrange(1, 40)] + [draw.randrange(5, runner.facts.vocab_size)]
        params = SamplingParams(
            max_tokens=draw.randrange(40, 70), temperature=seed % 2, seed=seed, frequency_penalty=0.5 * (seed % 3)
        )
        jobs.append((prompt, params))
    replica = Replica(runner)
    together = replica.run(jobs, random.Random(1))
    for job, tokens in zip(jobs, together, strict=True):
        assert Replica(runner).run([job], random.Random(1)) == [tokens]
    figures = replica.stats.generation
    assert figures is not None
    assert figures.num_preemptions > 0
    assert figures.num_prefix_hit_tokens > 0
