"""The contract of a generate step, proved: a planner and a stateful rank that share nothing but ipc's messages,
tables and a real ring, through random admissions, chunks, drafts, aborts, preemptions, failed steps and lost epochs.
"""

import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from ipc.codec import FROM_RANK, TO_RANK, encode
from ipc.step import StepFailed, StepPlan, StepResult
from ipc.step_ring import RingError, StepRing, generate_layout
from ipc.submit import Rejected, Submit, TokenChunk
from ipc.types import ModelFacts, SamplingParams, new_incarnation
from scheduler.planner import Reply
from scheduler.request import Request
from tests.fakes.generation import FakeGenerationPlanner
from tests.fakes.stateful_rank import MASK, POISON_SEED, StatefulRank, mark, next_token, prompt_logprob

NUM_STEPS = 10_000
FACTS = ModelFacts(
    name="fake",
    architecture="fake",
    task="generate",
    vocab_size=97,
    max_model_len=128,
    dimension=1,
    max_num_seqs=6,
    max_num_batched_tokens=48,
    num_blocks=26,
    block_size=16,
    max_draft_tokens=3,
    max_logprobs=0,
    eos_token_ids=(0,),
)
BAD_TOKEN = 200


@dataclass
class Client:
    """What one request asked for and got."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    end: str = ""

    def reference(self) -> tuple[list[int], str]:
        """The tokens and the end that the model gives for this prompt alone."""
        total, tokens = 0, []
        for position, token in enumerate(self.prompt):
            total = (total + mark(token, position)) & MASK
        while True:
            token = next_token(total, self.params.seed or 0, FACTS.vocab_size)
            tokens.append(token)
            if token in FACTS.eos_token_ids and not self.params.ignore_eos:
                return tokens, "stop"
            if len(tokens) == self.params.max_tokens or len(self.prompt) + len(tokens) == FACTS.max_model_len:
                return tokens, "length"
            total = (total + mark(token, len(self.prompt) + len(tokens) - 1)) & MASK

    def reference_prompt_logprobs(self) -> list[float]:
        if self.params.prompt_logprobs is None:
            return []
        totals = np.array([mark(token, position) for position, token in enumerate(self.prompt)], np.uint64).cumsum()
        return [prompt_logprob(token, total) for token, total in zip(self.prompt[1:], totals.tolist(), strict=False)]


class Harness:
    """The loop around planner and rank: encodes, decodes, owns ring slots, loses epochs, delivers late."""

    def __init__(self, seed: int, acceptance: float, oom: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.acceptance, self.oom = acceptance, oom
        self.planner = FakeGenerationPlanner(FACTS, draft_length=lambda n: (3, 3, 2, 2, 1, 0, 0)[n])
        self.clients: dict[int, Client] = {}
        self.seen: Counter[str] = Counter()
        self.bases = [self._ids(96) for _ in range(3)]
        self.to_rank: deque[bytes] = deque()
        self.from_rank: deque[tuple[bytes, int]] = deque()
        self.ring: StepRing | None = None
        self._join()

    def _ids(self, count: int) -> list[int]:
        return [self.random.randrange(FACTS.vocab_size) for _ in range(count)]

    def _join(self) -> None:
        """A new epoch: new ring, new rank. What is under way from the old one is still delivered."""
        self.close()
        self.planner.epoch = new_incarnation()
        layout = generate_layout(FACTS)
        self.ring = StepRing.create(layout)
        self.rank_ring = StepRing.attach(os.dup(self.ring.fd), layout)
        self.rank = StatefulRank(FACTS, self.planner.epoch, self.random.randrange(1 << 30), self.acceptance, self.oom)
        self.free = deque(range(layout.num_slots))

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
            self.rank_ring.close()

    # --- actions ------------------------------------------------------------------------------------------

    def submit(self) -> None:
        length = self.random.randint(1, 90)
        shared = self.random.randint(0, length)
        prompt = self.random.choice(self.bases)[:shared] + self._ids(length - shared)
        chance = self.random.random()
        if chance < 0.01:
            prompt[self.random.randrange(length)] = BAD_TOKEN
        params = SamplingParams(
            max_tokens=self.random.randint(1, 40),
            seed=POISON_SEED if 0.01 < chance < 0.02 else self.random.randrange(600),
            ignore_eos=chance > 0.7,
            prompt_logprobs=0 if 0.1 < chance < 0.2 else None,
            grammar="g" * 150_000 if 0.02 < chance < 0.04 else None,  # two do not fit one step
        )
        self.add(prompt, params)

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        chunk_id = len(self.clients)
        self.clients[chunk_id] = Client(prompt, params)
        submit = Submit(chunk_id % 2, 9, chunk_id, [len(prompt)], timeout_ms=1, sampling=params)
        frame = np.asarray(prompt, np.int32).tobytes()
        assert self.planner.add(Request.from_submit(submit, frame, 0.0), 0.0) is None

    def abort(self) -> None:
        live = [chunk_id for chunk_id, client in self.clients.items() if not client.end]
        if live:
            chunk_id = self.random.choice(live)
            self.reply(self.planner.abort(chunk_id % 2, chunk_id, "disconnect"))

    def lose(self, times: int) -> None:
        """The rank dies; again and again, each time with the same work in flight."""
        for _ in range(times):
            self.plan()
            self.seen["lost epochs"] += 1
            self.seen["lost in flight"] += len(self.planner.sent)
            self.reply(self.planner.lost(self.planner.epoch, ordered=self.random.random() < 0.2, now=0.0))
            self._join()

    def plan(self) -> None:
        if len(self.planner.sent) == FACTS.num_steps_in_flight:
            return
        assert self.ring is not None
        slot = self.free[0]
        plan, replies = self.planner.plan(0.0, slot, self.ring.slot(slot))
        self.reply(replies)
        if plan is None:
            return
        self.free.popleft()
        self.ring.write_header(slot, plan.epoch, plan.step, plan.num_seqs, plan.num_tokens)
        self.to_rank.append(encode(plan))
        self.seen["planned on top of a step"] += len(self.planner.sent) - 1
        self.seen["verify steps"] += int(plan.draft_length > 0)

    def run_rank(self) -> None:
        if not self.to_rank:
            return
        plan = TO_RANK.decode(self.to_rank.popleft())
        assert isinstance(plan, StepPlan)
        if plan.epoch != self.rank.epoch:
            self.seen["stale plans"] += 1
            with pytest.raises(RingError):
                self.rank_ring.check_header(plan.slot, plan.epoch, plan.step)
            return
        assert self.rank_ring.check_header(plan.slot, plan.epoch, plan.step) == (plan.num_seqs, plan.num_tokens)
        result = self.rank.step(plan, self.rank_ring.slot(plan.slot))
        self.seen["steps"] += 1
        self.from_rank.append((encode(result), plan.slot))

    def deliver(self) -> None:
        if not self.from_rank:
            return
        frame, slot = self.from_rank.popleft()
        result = FROM_RANK.decode(frame)
        assert isinstance(result, StepResult | StepFailed)
        if result.epoch != self.planner.epoch:
            self.seen["stale results"] += 1
            return
        assert self.ring is not None
        self.seen["failed steps"] += int(isinstance(result, StepFailed))
        self.reply(self.planner.apply(result, self.ring.slot(slot), 0.0))
        self.free.append(slot)

    # --- checks -------------------------------------------------------------------------------------------

    def reply(self, replies: list[Reply]) -> None:
        for reply in replies:
            message = reply.message
            if isinstance(message, Rejected):
                self._end(message.chunk_id, reply.gateway, message.code)
            else:
                assert isinstance(message, TokenChunk)
                for delta in message.deltas:
                    client = self.clients[delta.chunk_id]
                    assert not client.end, "a token after the terminal reply"
                    assert delta.logprobs == [-float(token) for token in delta.tokens]
                    client.tokens += delta.tokens
                    client.prompt_logprobs += delta.prompt_logprobs
                    self.seen["accepted drafts"] += max(0, len(delta.tokens) - 1)
                    if delta.finish_reason:
                        self._end(delta.chunk_id, reply.gateway, delta.finish_reason)

    def _end(self, chunk_id: int, gateway: int, end: str) -> None:
        client = self.clients[chunk_id]
        assert not client.end, "two terminal replies"
        assert gateway == chunk_id % 2
        client.end = end
        self.seen[end] += 1

    def check_blocks(self) -> None:
        """Blocks and slots are either free or held, and as often held as counted."""
        held = Counter(block for sequence in self.planner.running for block in sequence.blocks)
        pool = self.planner.blocks
        assert pool.num_holders == [held[block] for block in range(FACTS.num_blocks)]
        assert sorted([*held, *pool.free]) == list(range(FACTS.num_blocks))
        slots = [sequence.slot for sequence in self.planner.running]
        assert sorted([*slots, *self.planner.free_slots]) == list(range(FACTS.max_num_seqs))

    def check_answers(self) -> None:
        for client in self.clients.values():
            if BAD_TOKEN in client.prompt:
                assert client.end in ("invalid", "aborted", "lost")
                continue
            tokens, end = client.reference()
            assert client.tokens == tokens[: len(client.tokens)]
            if client.params.seed == POISON_SEED:
                assert client.end in ("non_finite", "aborted", "lost")
                assert not client.tokens
            elif client.end in ("stop", "length"):
                assert (client.tokens, client.end) == (tokens, end)
                assert client.prompt_logprobs == client.reference_prompt_logprobs()
            else:
                assert client.end in ("aborted", "lost")

    def drain(self) -> None:
        """Until nothing is left to do, the releases of the last sequences included."""
        while self.planner.waiting or self.planner.running or self.planner.sent or self.to_rank or self.from_rank:
            self.plan()
            self.plan()
            self.run_rank()
            self.deliver()
        self.plan()
        self.run_rank()
        self.deliver()


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness(seed=20, acceptance=0.7, oom=0.004)
    yield made
    made.close()


def test_ten_thousand_random_steps(harness: Harness) -> None:
    """Every finished request got the model's own tokens, once; memory is whole; nothing of an old epoch counted."""
    draw, busy = harness.random, True
    while harness.seen["steps"] < NUM_STEPS:
        if draw.random() < 0.01:
            busy = not busy  # quiet times let pure decode steps happen, and with them drafts
        if len(harness.planner.waiting) < 4 and draw.random() < (0.25 if busy else 0.02):
            harness.submit()
        if draw.random() < 0.01:
            harness.abort()
        if draw.random() < 0.0015:
            harness.lose(times=draw.randint(1, 4))
        harness.plan()
        if draw.random() < 0.6:
            harness.run_rank()
        if draw.random() < 0.6:
            harness.deliver()
        if harness.seen["steps"] % 8 == 0:
            harness.check_blocks()
    harness.drain()
    harness.check_blocks()
    harness.check_answers()
    assert all(client.end for client in harness.clients.values())
    assert len(harness.planner.blocks.free) == FACTS.num_blocks
    assert harness.rank.slots == [None] * FACTS.max_num_seqs
    seen, planner = harness.seen, harness.planner
    assert seen["planned on top of a step"] > NUM_STEPS / 4
    for what in ("stop", "length", "aborted", "lost", "invalid", "non_finite", "verify steps", "accepted drafts"):
        assert seen[what] > 0, f"no {what}"
    for what in ("lost epochs", "lost in flight", "stale plans", "stale results", "failed steps"):
        assert seen[what] > 0, f"no {what}"
    assert planner.num_preemptions > 0
    assert planner.num_hit_tokens > 0


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_drafts_never_change_the_tokens(acceptance: float) -> None:
    harness = Harness(seed=5, acceptance=acceptance)
    try:
        for _ in range(30):
            harness.submit()
        harness.drain()
        harness.check_answers()
        verified = sum(client.end in ("stop", "length") for client in harness.clients.values())
        assert verified > 20
        assert harness.seen["verify steps"] > 0
        assert (harness.seen["accepted drafts"] > 0) == (acceptance > 0)
    finally:
        harness.close()


def test_rows_past_the_end_of_a_sequence_write_to_the_dummy_block() -> None:
    """Accepted drafts fill the last block while a further row, planned before that was known, is in flight."""
    harness = Harness(seed=5, acceptance=1.0)
    try:
        for length in range(1, 91):
            harness.add(list(range(length)), SamplingParams(max_tokens=-length % 16 + 16, seed=length, ignore_eos=True))
            harness.drain()
        harness.check_answers()
        assert harness.rank.num_dummy_writes > 0
    finally:
        harness.close()


def test_steps_planned_on_top_of_a_failed_one_fail_with_it() -> None:
    """A prompt of three chunks whose first step fails: the second fails too, the third attempt begins at the start."""
    harness = Harness(seed=7, acceptance=1.0)
    try:
        harness.add(list(range(1, 91)), SamplingParams(max_tokens=5, seed=1))
        harness.plan()
        harness.plan()
        harness.rank._oom = 1.0
        harness.run_rank()
        harness.rank._oom = 0.0
        harness.run_rank()
        harness.deliver()
        harness.plan()  # knows of the first failure only
        harness.drain()
        assert harness.seen["failed steps"] == 2
        assert harness.rank.num_induced_failures == 1
        harness.check_answers()
    finally:
        harness.close()


def test_a_wrong_generation_is_caught_by_the_rank(harness: Harness) -> None:
    """The check that the random walk relies on can fail: a row under an old generation is refused."""
    harness.submit()
    assert harness.ring is not None
    plan, _ = harness.planner.plan(0.0, 0, harness.ring.slot(0))
    assert plan is not None
    harness.ring.slot(0)["rows"][0, 1] += 1
    with pytest.raises(AssertionError, match="generation"):
        harness.rank.step(plan, harness.rank_ring.slot(0))


def test_a_foreign_write_into_the_cache_changes_the_tokens() -> None:
    """The check that the random walk relies on can fail: tokens depend on every cache entry before them."""
    harness = Harness(seed=3, acceptance=0.5)
    try:
        harness.submit()
        harness.plan()
        harness.run_rank()
        block = harness.planner.running[0].blocks[0]
        harness.rank.cache[block, 0] += np.uint64(1)
        harness.drain()
        with pytest.raises(AssertionError):
            harness.check_answers()
    finally:
        harness.close()
