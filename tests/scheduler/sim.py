"""A planner with a simulated clock and ranks that are a few lines: what they compute can be told from the ids alone."""

import zlib
from collections import deque
from itertools import pairwise

import numpy as np

from ipc.step import (
    ROW_OUTPUT_OFFSET,
    STATUS_BAD_TOKEN,
    STATUS_NON_FINITE,
    StepFailed,
    StepPlan,
    StepResult,
)
from ipc.step_ring import layout_for, local_slots
from ipc.submit import Rejected, Result, Submit
from ipc.types import ModelFacts
from scheduler.config import SchedulerConfig
from scheduler.embedding.batcher import EncodePlanner
from scheduler.planner import Reply
from scheduler.quarantine import Quarantine
from scheduler.request import Request
from scheduler.stats import Stats

DIMENSION = 4
POISON, BAD, NAN = 666, 667, 668  # token ids that end the ranks, are out of range to them, come out as NaN
GATEWAY = 7


def facts(**changes: object) -> ModelFacts:
    fields = {
        "name": "sim",
        "architecture": "Sim",
        "task": "embed",
        "vocab_size": 1000,
        "max_model_len": 64,
        "dimension": DIMENSION,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "quadratic_tokens": 1 << 62,  # cost is tokens, to the last bit
    }
    return ModelFacts(**(fields | changes))  # type: ignore[arg-type]


def vector(ids: list[int]) -> bytes:
    """float32 [DIMENSION] of one row."""
    seed = zlib.crc32(np.asarray(ids, np.int32).tobytes())
    return (np.arange(1, DIMENSION + 1) * float(seed % 9973)).astype(np.float32).tobytes()


class Sim:
    """Drives a planner; `answers` keeps every terminal message by (gateway, chunk)."""

    def __init__(self, model: ModelFacts | None = None, **config: object) -> None:
        self.facts = model or facts()
        self.config = SchedulerConfig(**config)  # type: ignore[arg-type]
        self.stats = Stats("sim/0")
        self.quarantine = Quarantine(self.config.quarantine_ttl_ms)
        self.planner = EncodePlanner(self.facts, self.config, self.stats, self.quarantine)
        self.slots = local_slots(layout_for(self.facts))
        self.free = deque(range(len(self.slots)))
        self.flying: deque[StepPlan] = deque()
        self.now = 1000.0
        self.epoch = 1
        self.num_deaths = 0
        self.answers: dict[tuple[int, int], list[tuple[Result | Rejected, bytes]]] = {}
        self.rows: dict[tuple[int, int], list[list[int]]] = {}
        self.plans: list[StepPlan] = []
        self.contents: list[list[list[int]]] = []  # of every plan: the rows that went in
        self.oom_over = 1 << 30

    def submit(
        self, chunk_id: int, rows: list[list[int]], gateway: int = GATEWAY, **changes: object
    ) -> Rejected | None:
        frame = np.asarray([token for row in rows for token in row], np.int32).tobytes()
        fields = {
            "gateway": gateway,
            "scheduler": 1,
            "chunk_id": chunk_id,
            "lengths": [len(row) for row in rows],
            "timeout_ms": 1_000_000,
        }
        submit = Submit(**(fields | changes))  # type: ignore[arg-type]
        refused = self.planner.add(Request.from_submit(submit, frame, self.now), self.now)
        if refused is None:
            self.rows[gateway, chunk_id] = rows
        return refused

    def plan(self) -> StepPlan | None:
        """Asks for one step and puts it in flight."""
        slot = self.free[0]
        plan, replies = self.planner.plan(self.now, slot, self.slots[slot])
        self.take(replies)
        if plan is None:
            return None
        assert plan.slot == slot
        assert plan.num_tokens <= self.facts.max_num_batched_tokens
        assert 1 <= plan.num_seqs <= self.facts.max_num_seqs
        self.free.popleft()
        self.flying.append(plan)
        assert len(self.flying) <= self.facts.num_steps_in_flight
        self.plans.append(plan)
        self.contents.append(self.read(plan))
        return plan

    def fill(self) -> int:
        """Plans until nothing is due; returns how many."""
        count = 0
        while self.plan() is not None:
            count += 1
        return count

    def read(self, plan: StepPlan) -> list[list[int]]:
        arrays = self.slots[plan.slot]
        cu_seqlens = arrays["cu_seqlens"][: plan.num_seqs + 1].tolist()
        assert cu_seqlens[0] == 0
        assert cu_seqlens[-1] == plan.num_tokens
        return [arrays["input_ids"][a:b].tolist() for a, b in pairwise(cu_seqlens)]

    def finish(self) -> None:
        """The oldest step's end: whatever its rows make of it."""
        plan = self.flying[0]
        rows = self.read(plan)
        if any(POISON in row for row in rows):
            self.die()
            return
        self.flying.popleft()
        arrays = self.slots[plan.slot]
        outcome: StepResult | StepFailed = StepResult(self.epoch, plan.step, 1000)
        if plan.num_tokens > self.oom_over:
            outcome = StepFailed(self.epoch, plan.step, "oom")
        else:
            for index, row in enumerate(rows):
                offset = int(arrays["rows"][index, ROW_OUTPUT_OFFSET])
                arrays["values"][offset : offset + 4 * DIMENSION] = np.frombuffer(vector(row), np.uint8)
                arrays["status"][index] = STATUS_BAD_TOKEN if BAD in row else STATUS_NON_FINITE if NAN in row else 0
        self.take(self.planner.apply(outcome, arrays, self.now))
        self.free.append(plan.slot)

    def die(self, ordered: bool = False) -> None:
        self.num_deaths += not ordered
        self.free.extend(plan.slot for plan in self.flying)
        self.flying.clear()
        self.take(self.planner.lost(self.epoch, ordered, self.now))
        self.epoch += 1

    def abort(self, chunk_id: int | None, gateway: int = GATEWAY, reason: str = "disconnect") -> None:
        self.take(self.planner.abort(gateway, chunk_id, reason))

    def run(self, max_steps: int = 10_000) -> None:
        """Until everything is answered."""
        for _ in range(max_steps):
            if self.stats.pending_requests == 0:
                return
            self.fill()
            if self.flying:
                self.now += 0.001
                self.finish()
        raise AssertionError(f"{self.stats.pending_requests} requests are stuck")

    def take(self, replies: list[Reply]) -> None:
        for reply in replies:
            message = reply.message
            assert isinstance(message, Result | Rejected)
            assert message.gateway == reply.gateway
            payload = bytes(reply.payload or b"")
            self.answers.setdefault((reply.gateway, message.chunk_id), []).append((message, payload))

    def answer(self, chunk_id: int, gateway: int = GATEWAY) -> Result | Rejected:
        """The one terminal message; a Result is checked to be the right one."""
        (found,) = self.answers[gateway, chunk_id]
        message, payload = found
        if isinstance(message, Result):
            rows = self.rows[gateway, chunk_id]
            assert (message.num_rows, message.row_bytes) == (len(rows), 4 * DIMENSION)
            assert payload == b"".join(vector(row) for row in rows)
        return message

    def code(self, chunk_id: int, gateway: int = GATEWAY) -> str:
        message = self.answer(chunk_id, gateway)
        return message.code if isinstance(message, Rejected) else "ok"
