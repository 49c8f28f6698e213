"""What the loop asks of a planner. Policy is pure: no sockets, no clocks, no tensors; time is an argument.

Embeddings and generation are two planners under one loop.
"""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from ipc.step import StepFailed, StepPlan, StepResult
from ipc.step_ring import Arrays
from ipc.submit import RejectCode, Rejected
from ipc.types import ModelFacts
from scheduler.config import SchedulerConfig
from scheduler.quarantine import Quarantine
from scheduler.request import Request
from scheduler.stats import Stats

RANKS_AWAY = "ranks_away"  # a reason to abort: let other replicas have the work
ABORT_CODES: dict[str, RejectCode] = {"draining": "draining", "not_ready": "not_ready", RANKS_AWAY: "not_ready"}


class Diverged(RuntimeError):
    """What a rank answered cannot be what it was asked: its state is another than the planner's."""


class Reply(Struct, frozen=True):
    """A message for one gateway and the raw frame behind it, if any."""

    gateway: int
    message: Struct
    payload: bytes | memoryview | None = None


class Planner(Protocol):
    """`now` is in seconds on a monotonic clock. Every request added gets exactly one terminal reply.

    A planner numbers its steps from 1, never twice the same, and keeps the bound on steps in flight. It leaves
    `epoch` to whoever sends the plan.

    `facts` may be set to those of the next epoch's ranks before anything is planned for them, if they differ in
    `num_blocks` at most: how much memory is left differs from one start to the next.
    """

    facts: ModelFacts

    def add(self, request: Request, now: float) -> Rejected | None:
        """Takes a request into the pool, or says why not."""

    def plan(self, now: float, slot: int, arrays: Arrays) -> tuple[StepPlan | None, list[Reply]]:
        """The next step, its arrays written into `arrays` (slot `slot` of the ring); None when nothing is due.

        The replies are those of requests found cancelled or expired when popped.
        """

    def apply(self, result: StepResult | StepFailed, arrays: Arrays, now: float) -> list[Reply]:
        """Takes a step's outcome. `arrays` are views of its slot, valid during the call.

        Raises Diverged, with nothing of the step taken: the epoch must end.
        """

    def abort(self, gateway: int, chunk_id: int | None, reason: str) -> list[Reply]:
        """Cancels one chunk, or with None all of a gateway's. No further step will contain it.

        `reason` "draining" or "not_ready" becomes the code of the Rejected, any other gives "aborted". RANKS_AWAY
        gives "not_ready" to those that only wait: a request with a row in flight or under suspicion stays.
        """

    def lost(self, epoch: int, ordered: bool, now: float) -> list[Reply]:
        """The ranks of `epoch` are gone: requeues what was in flight, as suspects unless the stop was ordered."""


PlannerFactory = Callable[[ModelFacts, SchedulerConfig, Stats, Quarantine], Planner]
