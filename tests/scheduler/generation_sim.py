"""The loop around a generation planner and a stateful rank: real codecs, a real ring, late deliveries, lost epochs.

Planner and rank share nothing but ipc's messages and tables. The clock is simulated. Every answer is checked against
what the model gives for that prompt alone.
"""

import os
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace

from ipc.codec import FROM_RANK, TO_RANK, encode
from ipc.step import GEN_KIND, GEN_NUM_TOKENS, GEN_SLOT, StepFailed, StepPlan, StepResult
from ipc.step_ring import Arrays, RingError, StepRing, generate_layout
from ipc.submit import Rejected, Submit, TokenChunk, TokenDelta
from ipc.types import ModelFacts, SamplingParams, new_incarnation
from scheduler.config import SchedulerConfig
from scheduler.llm.planner import GeneratePlanner
from scheduler.planner import Reply
from scheduler.quarantine import Quarantine
from scheduler.request import Request
from scheduler.stats import Stats
from tests.fakes.stateful_rank import POISON_SEED, UNUSABLE_SEED, StatefulRank, mark, prompt_logprob, reference

BAD_TOKEN = 200
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


@dataclass
class Client:
    """What one request asked of a model and got. `end` is the finish reason, or the code it was rejected with."""

    prompt: list[int]
    params: SamplingParams
    facts: ModelFacts
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    end: str = ""
    last: TokenDelta | Rejected | None = None
    deltas: list[TokenDelta] = field(default_factory=list)

    def reference_prompt_logprobs(self) -> list[float]:
        if self.params.prompt_logprobs is None:
            return []
        totals = np.array([mark(token, position) for position, token in enumerate(self.prompt)], np.uint64).cumsum()
        return [prompt_logprob(token, total) for token, total in zip(self.prompt[1:], totals.tolist(), strict=False)]

    def check(self) -> None:
        """What came is right, and all of it did if it ended well."""
        if BAD_TOKEN in self.prompt:
            assert self.end not in ("stop", "length")
            return
        if not self.tokens and self.end not in ("stop", "length"):
            return
        tokens, end = reference(self.prompt, self.params, self.facts)
        assert self.tokens == tokens[: len(self.tokens)]
        if self.params.seed in (POISON_SEED, UNUSABLE_SEED):
            assert not self.tokens
            assert self.end not in ("stop", "length")
        elif self.end in ("stop", "length"):
            assert (self.tokens, self.end) == (tokens, end)
            assert self.prompt_logprobs == self.reference_prompt_logprobs()


class GenerationSim:
    """Encodes, decodes, owns ring slots, loses epochs, delivers late. `seen` counts what happened."""

    def __init__(
        self,
        seed: int = 1,
        acceptance: float = 1.0,
        oom: float = 0.0,
        facts: ModelFacts = FACTS,
        draft_length: Callable[[int], int] | None = lambda _: 0,
        **config: object,
    ) -> None:
        self.random = random.Random(seed)
        self.acceptance, self.oom, self.facts = acceptance, oom, facts
        self.config = SchedulerConfig(**({"canary_interval_ms": 10**9} | config))  # type: ignore[arg-type]
        self.stats = Stats("sim/0")
        self.quarantine = Quarantine(self.config.quarantine_ttl_ms)
        self.planner = GeneratePlanner(facts, self.config, self.stats, self.quarantine, draft_length)
        self.now = 1000.0
        self.clients: dict[int, Client] = {}
        self.seen: Counter[str] = Counter()
        self.plans: list[StepPlan] = []
        self.contents: list[dict[int, tuple[int, int]]] = []  # of every plan: chunk → (kind, tokens) of its row
        self.to_rank: deque[bytes] = deque()
        self.from_rank: deque[tuple[bytes, int]] = deque()
        self.ring: StepRing | None = None
        self.join()

    @property
    def num_in_flight(self) -> int:
        return self.stats.steps_in_flight

    def join(self) -> None:
        """A new epoch: new ring, new rank. What is under way from the old one is still delivered."""
        self.close()
        self.epoch = new_incarnation()
        layout = generate_layout(self.facts)
        self.ring = StepRing.create(layout)
        self.rank_ring = StepRing.attach(os.dup(self.ring.fd), layout)
        self.rank = StatefulRank(self.facts, self.epoch, self.random.randrange(1 << 30), self.acceptance, self.oom)
        self.free = deque(range(layout.num_slots))

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
            self.rank_ring.close()

    # --- actions ------------------------------------------------------------------------------------------

    def add(self, prompt: list[int], params: SamplingParams, **changes: object) -> Rejected | None:
        """Submits as chunk len(clients), of gateway 0 or 1 by turns."""
        chunk_id = len(self.clients)
        self.clients[chunk_id] = Client(prompt, params, self.facts)
        fields = {"lengths": [len(prompt)], "timeout_ms": 10**9, "sampling": params}
        submit = Submit(chunk_id % 2, 9, chunk_id, **(fields | changes))  # type: ignore[arg-type]
        frame = np.asarray(prompt, np.int32).tobytes()
        refused = self.planner.add(Request.from_submit(submit, frame, self.now), self.now)
        if refused is not None:
            self._end(self.clients[chunk_id], refused.code, refused)
        return refused

    def abort(self, chunk_id: int, reason: str = "disconnect") -> None:
        self.reply(self.planner.abort(chunk_id % 2, chunk_id, reason))

    def die(self, ordered: bool = False) -> None:
        self.seen["lost epochs"] += 1
        self.seen["lost in flight"] += self.num_in_flight
        self.reply(self.planner.lost(self.epoch, ordered, self.now))
        self.join()

    def plan(self) -> StepPlan | None:
        """Asks for one step and sends it."""
        if not self.free:
            return None
        assert self.ring is not None
        slot = self.free[0]
        plan, replies = self.planner.plan(self.now, slot, self.ring.slot(slot))
        self.reply(replies)
        if plan is None:
            return None
        self.free.popleft()
        assert self.num_in_flight <= self.facts.num_steps_in_flight
        plan = replace(plan, epoch=self.epoch)
        self.plans.append(plan)
        self.contents.append(self._read(plan, self.ring.slot(slot)))
        self.ring.write_header(slot, plan.epoch, plan.step, plan.num_seqs, plan.num_tokens)
        self.to_rank.append(encode(plan))
        self.seen["planned on top of a step"] += self.num_in_flight - 1
        self.seen["verify steps"] += int(plan.draft_length > 0)
        return plan

    def _read(self, plan: StepPlan, arrays: Arrays) -> dict[int, tuple[int, int]]:
        if plan.canary:
            return {}
        chunk_of = {sequence.slot: sequence.chunk_id for sequence in self.planner.residents.running}
        rows = arrays["rows"][: plan.num_seqs].tolist()
        assert sum(row[GEN_NUM_TOKENS] for row in rows) <= self.facts.max_num_batched_tokens
        return {chunk_of[row[GEN_SLOT]]: (row[GEN_KIND], row[GEN_NUM_TOKENS]) for row in rows}

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
        if result.epoch != self.epoch:
            self.seen["stale results"] += 1
            return
        assert self.ring is not None
        self.seen["failed steps"] += int(isinstance(result, StepFailed))
        self.reply(self.planner.apply(result, self.ring.slot(slot), self.now))
        self.free.append(slot)

    def run_step(self) -> StepPlan | None:
        """Plans as much as may be in flight, and brings the oldest to its end. The first plan, if there was one."""
        first = self.plan()
        while self.plan() is not None:
            pass
        self.now += 0.01
        self.run_rank()
        self.deliver()
        return first

    def drain(self, max_steps: int = 5000) -> None:
        """Until nothing is left to do, the releases of the last sequences included."""
        for _ in range(max_steps):
            is_idle = not self.to_rank and not self.from_rank and not self.num_in_flight
            if self.run_step() is None and is_idle:
                assert self.stats.pending_requests == 0, "requests are stuck"
                return
        raise AssertionError("it does not come to an end")

    # --- checks -------------------------------------------------------------------------------------------

    def reply(self, replies: list[Reply]) -> None:
        told: Counter[int] = Counter()
        for reply in replies:
            message = reply.message
            if isinstance(message, Rejected):
                assert message.gateway == reply.gateway == message.chunk_id % 2
                self._end(self.clients[message.chunk_id], message.code, message)
                continue
            assert isinstance(message, TokenChunk)
            assert message.gateway == reply.gateway
            told[reply.gateway] += 1
            for delta in message.deltas:
                assert delta.chunk_id % 2 == reply.gateway
                self._take(self.clients[delta.chunk_id], delta)
        assert not told or max(told.values()) == 1, "more than one message for a gateway"

    def _take(self, client: Client, delta: TokenDelta) -> None:
        assert not client.end, "a token after the terminal reply"
        assert delta.logprobs == ([-float(t) for t in delta.tokens] if client.params.logprobs is not None else [])
        client.tokens += delta.tokens
        client.prompt_logprobs += delta.prompt_logprobs
        client.deltas.append(delta)
        self.seen["accepted drafts"] += max(0, len(delta.tokens) - 1)
        if delta.finish_reason:
            assert delta.num_prompt_tokens == len(client.prompt)
            assert delta.timings is not None
            assert delta.timings.queue_ms >= 0
            self._end(client, delta.finish_reason, delta)

    def _end(self, client: Client, end: str, message: TokenDelta | Rejected) -> None:
        assert not client.end, "two terminal replies"
        client.end, client.last = end, message
        self.seen[end] += 1

    def check_memory(self) -> None:
        """Blocks and slots are free or held, as often as counted; what can be found is somewhere."""
        residents, blocks = self.planner.residents, self.planner.residents.blocks
        held = Counter(block for sequence in residents.running for block in sequence.blocks)
        assert blocks.num_holders == [held[block] for block in range(self.facts.num_blocks)]
        assert blocks.num_free == self.facts.num_blocks - len(held)
        assert blocks.num_cached <= self.facts.num_blocks
        slots = [sequence.slot for sequence in residents.running]
        assert sorted([*slots, *residents.free_slots]) == list(range(self.facts.max_num_seqs))
        assert residents.running == sorted(residents.running, key=lambda sequence: sequence.order)
        assert residents.num_bulk == sum(sequence.is_bulk for sequence in residents.running)

    def check_nothing_left(self) -> None:
        """After `drain`: every block, slot, lane and request is back, here and at the rank."""
        self.check_memory()
        planner, roster = self.planner, self.planner.roster
        assert not planner.residents.running
        assert planner.residents.blocks.num_free == self.facts.num_blocks
        assert roster.lanes.num_used == 0
        assert (roster.pool.num_requests, roster.pool.num_tokens) == (0, 0)
        assert self.rank.slots == [None] * self.facts.max_num_seqs
        assert all(client.end for client in self.clients.values())

    def check_answers(self) -> None:
        for client in self.clients.values():
            client.check()
