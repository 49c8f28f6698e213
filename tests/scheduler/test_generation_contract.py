"""The contract of a generate step, proved: the planner and a stateful rank that share nothing but ipc's messages,
tables and a real ring, through random admissions, chunks, drafts, aborts, preemptions, failed steps and lost epochs.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from ipc.step import GEN_GENERATION
from ipc.types import SamplingParams
from scheduler.llm import prefix_cache
from scheduler.planner import Diverged
from tests.fakes.stateful_rank import POISON_SEED
from tests.scheduler.generation_sim import BAD_TOKEN, FACTS, GenerationSim

NUM_STEPS = 10_000


class Walk(GenerationSim):
    """Random actions. Prompts share beginnings, some are poisoned, some huge in their params."""

    def __init__(self, seed: int, acceptance: float, oom: float = 0.0) -> None:
        super().__init__(seed, acceptance, oom, draft_length=lambda n: (3, 3, 2, 2, 1, 0, 0)[n], canary_interval_ms=300)
        self.bases = [self._ids(96) for _ in range(3)]

    def _ids(self, count: int) -> list[int]:
        return [self.random.randrange(FACTS.vocab_size) for _ in range(count)]

    def submit(self) -> None:
        draw = self.random
        length = draw.randint(1, 88)
        shared = draw.randint(0, length)
        prompt = draw.choice(self.bases)[:shared] + self._ids(length - shared)
        chance = draw.random()
        if chance < 0.01:
            prompt[draw.randrange(length)] = BAD_TOKEN
        max_tokens = draw.randint(1, 40)
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw.randint(0, max_tokens) if draw.random() < 0.2 else 0,
            seed=POISON_SEED if 0.01 < chance < 0.02 else draw.randrange(600),
            ignore_eos=chance > 0.7,
            stop_token_ids=(5, 6) if draw.random() < 0.2 else (),
            logprobs=0 if draw.random() < 0.5 else None,
            prompt_logprobs=0 if 0.1 < chance < 0.2 else None,
            grammar="g" * 150_000 if 0.02 < chance < 0.04 else None,  # two do not fit one step
        )
        changes = {
            "priority": "bulk" if draw.random() < 0.3 else "interactive",
            "timeout_ms": draw.randint(10, 200) if draw.random() < 0.05 else 10**9,
            "attempt": draw.choice([1, 1, 1, 2]),
            "cache_salt": draw.choice([b"", b"", b"other"]),
        }
        assert self.add(prompt, params, **changes) is None

    def abort_any(self) -> None:
        live = [chunk_id for chunk_id, client in self.clients.items() if not client.end]
        if live:
            self.abort(self.random.choice(live))

    def lose(self, times: int) -> None:
        """The rank dies; again and again, each time with the same work in flight."""
        for _ in range(times):
            self.plan()
            self.die(ordered=self.random.random() < 0.2)

    def act(self, busy: bool) -> None:
        draw = self.random
        if self.stats.pending_requests < 10 and draw.random() < (0.25 if busy else 0.02):
            self.submit()
        if draw.random() < 0.01:
            self.abort_any()
        if draw.random() < 0.0015:
            self.lose(times=draw.randint(1, 4))
        self.plan()
        self.now += 0.001
        if draw.random() < 0.6:
            self.run_rank()
        if draw.random() < 0.6:
            self.deliver()


@pytest.fixture(autouse=True)
def _wait_for_single_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps here are too small for beginnings that are worth waiting for otherwise."""
    monkeypatch.setattr(prefix_cache, "SHARED_TOKENS", FACTS.block_size)


@pytest.fixture
def walk() -> Iterator[Walk]:
    made = Walk(seed=20, acceptance=0.7, oom=0.004)
    yield made
    made.close()


def test_ten_thousand_random_steps() -> None:
    """Every finished request got the model's own tokens, once; memory is whole; nothing of an old epoch counted."""
    seen: Counter[str] = Counter()
    for walk, num_steps in (
        (Walk(seed=20, acceptance=0.7, oom=0.004), NUM_STEPS * 7 // 10),
        (Walk(seed=100, acceptance=1.0, oom=0.03), NUM_STEPS * 3 // 10),
    ):
        try:
            _run(walk, num_steps)
        finally:
            walk.close()
        figures = walk.stats.generation
        assert figures is not None
        seen += walk.seen
        seen["preemptions"] += figures.num_preemptions
        seen["prefix hits"] += figures.num_prefix_hit_tokens
        seen["canaries"] += walk.stats.num_canaries
        assert walk.stats.num_bad_canaries == 0
    assert seen["planned on top of a step"] > NUM_STEPS / 4
    for what in ("stop", "length", "aborted", "expired", "lost", "quarantined", "invalid", "non_finite"):
        assert seen[what] > 0, f"no {what}"
    for what in ("lost epochs", "lost in flight", "stale plans", "stale results", "failed steps"):
        assert seen[what] > 0, f"no {what}"
    for what in ("verify steps", "accepted drafts", "preemptions", "prefix hits", "canaries"):
        assert seen[what] > 0, f"no {what}"


def _run(walk: Walk, num_steps: int) -> None:
    busy = True
    while walk.seen["steps"] < num_steps:
        if walk.random.random() < 0.01:
            busy = not busy  # quiet times let pure decode steps happen, and with them drafts
        walk.act(busy)
        if walk.seen["steps"] % 8 == 0:
            walk.check_memory()
    walk.drain()
    walk.check_nothing_left()
    walk.check_answers()


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_drafts_never_change_the_tokens(acceptance: float) -> None:
    walk = Walk(seed=5, acceptance=acceptance)
    try:
        for _ in range(30):
            walk.submit()
        walk.drain()
        walk.check_nothing_left()
        walk.check_answers()
        verified = sum(client.end in ("stop", "length") for client in walk.clients.values())
        assert verified > 20
        assert walk.seen["verify steps"] > 0
        assert (walk.seen["accepted drafts"] > 0) == (acceptance > 0)
    finally:
        walk.close()


def test_rows_past_the_end_of_a_sequence_write_to_the_dummy_block() -> None:
    """Accepted drafts fill the last block while a further row, planned before that was known, is in flight."""
    walk = Walk(seed=5, acceptance=1.0)
    try:
        for length in range(1, 91):
            walk.add(list(range(length)), SamplingParams(max_tokens=-length % 16 + 16, seed=length, ignore_eos=True))
            walk.drain()
        walk.check_answers()
        assert walk.rank.num_dummy_writes > 0
    finally:
        walk.close()


def test_steps_planned_on_top_of_a_failed_one_fail_with_it() -> None:
    """A prompt of three chunks whose first step fails: the second fails too, the third attempt begins at the start."""
    walk = Walk(seed=7, acceptance=1.0)
    try:
        walk.add(list(range(1, 89)), SamplingParams(max_tokens=5, seed=1))
        walk.plan()
        walk.plan()
        walk.rank._oom = 1.0
        walk.run_rank()
        walk.rank._oom = 0.0
        walk.run_rank()
        walk.deliver()
        walk.plan()  # knows of the first failure only
        walk.drain()
        assert walk.seen["failed steps"] == 2
        assert walk.rank.num_induced_failures == 1
        walk.check_answers()
    finally:
        walk.close()


def test_a_wrong_generation_is_caught_by_the_rank(walk: Walk) -> None:
    """The check that the random walk relies on can fail: a row under an old generation is refused."""
    walk.submit()
    plan = walk.plan()
    assert plan is not None
    assert walk.ring is not None
    walk.ring.slot(plan.slot)["rows"][0, GEN_GENERATION] += 1
    with pytest.raises(AssertionError, match="generation"):
        walk.run_rank()


def test_a_foreign_write_into_the_cache_changes_the_tokens() -> None:
    """The check that the random walk relies on can fail: tokens depend on every cache entry before them."""
    walk = Walk(seed=3, acceptance=0.5)
    try:
        walk.submit()
        walk.plan()
        walk.run_rank()
        block = walk.planner.residents.running[0].blocks[0]
        walk.rank.cache[block, 0] += np.uint64(1)
        walk.drain()
        with pytest.raises(AssertionError):
            walk.check_answers()
    finally:
        walk.close()


@pytest.mark.parametrize(("array", "match"), [("lengths", "slot holds"), ("num_tokens", "gave")])
def test_a_rank_that_knows_other_numbers_has_diverged(walk: Walk, array: str, match: str) -> None:
    walk.rank._oom = 0.0
    walk.add([1, 2, 3], SamplingParams(max_tokens=5, seed=1))
    plan = walk.plan()
    assert plan is not None
    walk.run_rank()
    assert walk.ring is not None
    walk.ring.slot(plan.slot)[array][0] += 1
    with pytest.raises(Diverged, match=match):
        walk.deliver()
    walk.die()
    walk.drain()
    walk.check_answers()
    assert walk.clients[0].end in ("stop", "length")
