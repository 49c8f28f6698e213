"""The main loop of one replica's scheduler: receive → plan → send → collect → reply.

Event-driven: sockets call back, and whatever brings work or a free slot makes the next plan due. Open this file first.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from ipc import addresses
from ipc.control import Quarantine as QuarantineMessage
from ipc.control import ReplicaState, Status
from ipc.step import StepFailed, StepResult
from ipc.step_ring import Arrays
from ipc.submit import RejectCode, Submit
from ipc.types import ModelFacts, Task, new_incarnation
from scheduler.config import SchedulerConfig
from scheduler.embedding.batcher import EncodePlanner
from scheduler.gateway_link import GatewayLink
from scheduler.llm.planner import GeneratePlanner
from scheduler.planner import RANKS_AWAY, Diverged, Planner, PlannerFactory, Reply
from scheduler.quarantine import Quarantine
from scheduler.rank_link import RankLink
from scheduler.request import Request
from scheduler.stats import Stats

PLANNERS: Mapping[Task, PlannerFactory] = {
    "embed": EncodePlanner,
    "score": EncodePlanner,
    "generate": GeneratePlanner,
}
MAX_TICK_S = 0.2  # how often deadlines and silences are looked at
STALL_S = 1.0  # a tick later than this says that we stood still, not that the others did
RANKS_BACK_S = 1.5  # for so long after ranks left, work waits for the next ones; then it goes back to its gateway
RETRY_AFTER_MS = 1_000
MARGIN_MS = 1_000  # of readiness, for a step that ends at its deadline to be noticed and told
GOODBYE_S = 0.1  # for the I/O thread to send the last replies

Log = Callable[..., None]


class Scheduler:
    """One replica: its gateways on one side, its ranks on the other, a planner between them."""

    def __init__(
        self,
        config: SchedulerConfig,
        replica: str,
        model: str,
        tensor_parallel_size: int,
        run_dir: Path,
        log: Log,
        end_rank: Callable[[int], object],
        planners: Mapping[Task, PlannerFactory] = PLANNERS,
    ) -> None:
        """Binds its endpoints; must run on the loop. Raises ipc.sockets.EndpointInUse."""
        self.config, self.model, self.log = config, model, log
        self.incarnation = new_incarnation()
        self.stats = Stats(replica)
        self.quarantine = Quarantine(config.quarantine_ttl_ms)
        self.planner: Planner | None = None  # since the first ranks were ready
        self.facts: ModelFacts | None = None
        self.draining = False
        self.done = asyncio.Event()  # draining, and nothing is left that could be finished
        self._planners = planners
        self._loop = asyncio.get_running_loop()
        self._pump_scheduled = False
        self._ranks_left_at: float | None = None
        with contextlib.ExitStack() as opened:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            opened.callback(context.destroy, linger=0)
            size = tensor_parallel_size
            self.ranks = RankLink(
                context, run_dir, replica, size, self.incarnation, config, self.stats, self, log, end_rank
            )
            opened.callback(self.ranks.close)
            endpoint = addresses.gateway_endpoint(run_dir, replica)
            self.gateways = GatewayLink(context, endpoint, self.incarnation, config, self.stats, self, log)
            opened.callback(self.gateways.close)
            self._opened = opened.pop_all()
        self._tick_s = min(MAX_TICK_S, min(config.step_deadline_ms, config.rank_heartbeat_ms) / 5000)
        self._ticked_at = time.monotonic()
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        log("scheduler_started", incarnation=f"{self.incarnation:x}", model=model)

    # --- receive --------------------------------------------------------------------------------------------

    def on_submit(self, submit: Submit, frame: bytes) -> None:
        now = time.monotonic()
        request = Request.from_submit(submit, frame, now)
        refusal = self._closed_for(request, now)
        if refusal is not None:
            self._refuse(request, *refusal)
            return
        assert self.planner is not None
        try:
            rejected = self.planner.add(request, now)
        except Exception as error:  # noqa: BLE001 - whatever a request can do at the door, it does to itself alone
            self.log("door_error", level="error", error=f"{type(error).__name__}: {error}")
            self._refuse(request, "invalid", "the scheduler cannot take this chunk; its log says why")
            return
        if rejected is not None:
            self.gateways.reply([Reply(submit.gateway, rejected)])
            return
        self._pump_soon()

    def on_abort(self, gateway: int, chunk_id: int | None, reason: str) -> None:
        if self.planner is not None:
            self._reply(self.planner.abort(gateway, chunk_id, reason))

    # --- plan → send ----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Plans and sends while something is due and a slot is free."""
        self._pump_scheduled = False
        while self.planner is not None and (slot := self.ranks.free_slot()) is not None:
            plan, replies = self.planner.plan(time.monotonic(), slot, self.ranks.arrays(slot))
            if plan is not None:
                self.ranks.send(plan)
            self._reply(replies)
            if plan is None:
                return

    def _pump_soon(self) -> None:
        """After the messages that have arrived already, so that they share a step."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    # --- collect → reply ------------------------------------------------------------------------------------

    def on_outcome(self, outcome: StepResult | StepFailed, arrays: Arrays) -> None:
        assert self.planner is not None
        bad_canaries = self.stats.num_bad_canaries
        try:
            replies = self.planner.apply(outcome, arrays, time.monotonic())
        except Diverged as error:
            self.ranks.end_epoch(f"step {outcome.step}: {error}")
            return
        if self.stats.num_bad_canaries > bad_canaries:
            self.log("canary_failed", level="error", reason="the model's output for one token is not finite")
        self._pump()  # the ranks first: a reply can wait for the few microseconds
        self._reply(replies)

    def _reply(self, replies: list[Reply]) -> None:
        self.gateways.reply(replies)
        if self.draining and self.stats.pending_requests == 0:
            self.done.set()

    # --- ranks come and go ----------------------------------------------------------------------------------

    def on_ranks_ready(self, facts: ModelFacts) -> None:
        if self.planner is not None and self.facts == replace(facts, num_blocks=self.planner.facts.num_blocks):
            self.facts = self.planner.facts = facts  # another share of memory at most: work goes on
        else:
            if self.planner is not None:
                self.log("facts_changed", model=self.model)
                self._flush("not_ready")
            self.facts = facts
            factory = self._planners.get(facts.task)
            if factory is None:
                self.log("no_planner", level="error", task=facts.task, known=sorted(self._planners))
            self.planner = factory and factory(facts, self.config, self.stats, self.quarantine)
        self._ranks_left_at = None
        self._announce()
        self._pump_soon()

    def on_ranks_draining(self) -> None:
        self._ranks_left_at = time.monotonic()
        self._announce()

    def on_ranks_lost(self, epoch: int, ordered: bool) -> None:
        now = time.monotonic()
        self._ranks_left_at = now
        if self.planner is not None:
            self._reply(self.planner.lost(epoch, ordered, now))
        found = self.quarantine.take_news()
        if found:
            self.log("quarantined", level="error", fingerprints=[each.hex() for each in found])
            self.gateways.broadcast(QuarantineMessage(found, self.config.quarantine_ttl_ms))
        if self.draining:
            self.done.set()  # what is left goes elsewhere sooner than ranks come back
        self._announce()

    # --- state ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> ReplicaState:
        if self.draining:
            return "draining"
        return "ready" if self.ranks.is_ready and self.planner is not None else "starting"

    def status(self) -> Status:
        now = time.monotonic()
        own = self.stats.samples(self.incarnation, now)
        return Status(
            incarnation=self.incarnation,
            state=self.state,
            facts=self.facts,
            num_requests=self.stats.pending_requests,
            num_tokens=self.stats.pending_tokens,
            forward_age_ms=self.stats.forward_age_ms(now),
            max_forward_age_ms=self.config.canary_interval_ms + self.config.step_deadline_ms + MARGIN_MS,
            stats=[own, *self.ranks.process_stats, *self.gateways.process_stats],
        )

    def on_quarantine(self, message: QuarantineMessage) -> None:
        self.quarantine.accept(message.fingerprints, message.ttl_ms, time.monotonic())

    def quarantine_entries(self) -> list[QuarantineMessage]:
        return [QuarantineMessage([found], ttl_ms) for found, ttl_ms in self.quarantine.entries(time.monotonic())]

    async def drain(self) -> None:
        """Takes nothing more, finishes what is here within drain_timeout_ms, rejects the rest."""
        self.draining = True
        self._announce()
        if self.stats.pending_requests and (self.ranks.is_ready or self.stats.steps_in_flight):
            try:
                await asyncio.wait_for(self.done.wait(), self.config.drain_timeout_ms / 1000)
            except TimeoutError:
                self.log("drain_timed_out", level="warning", pending=self.stats.pending_requests)
        self._flush("draining")
        await asyncio.sleep(GOODBYE_S)

    def close(self) -> None:
        """Ranks keep their weights and wait for a successor."""
        self._timer.cancel()
        self._opened.close()
        self.log("scheduler_stopped")

    # --- details --------------------------------------------------------------------------------------------

    def _closed_for(self, request: Request, now: float) -> tuple[RejectCode, str] | None:
        """Why nothing is taken at present."""
        if self.draining:
            return "draining", "this replica is being stopped: send it elsewhere"
        awaited = self._ranks_left_at is not None and not self._ranks_are_away(now)
        if self.planner is None or not (self.ranks.is_ready or awaited):
            return "not_ready", f"model {self.model} has no ranks here at present: come back later"
        return None

    def _ranks_are_away(self, now: float) -> bool:
        """Whether they have been gone for so long that other replicas should have the work."""
        return self._ranks_left_at is not None and now - self._ranks_left_at >= RANKS_BACK_S

    def _refuse(self, request: Request, code: RejectCode, message: str) -> None:
        self.stats.requests[code] += 1
        rejected = request.rejection(code, message, None, RETRY_AFTER_MS)
        self.gateways.reply([Reply(request.submit.gateway, rejected)])

    def _abort_all(self, reason: str) -> None:
        for gateway in self.gateways.incarnations:
            self.on_abort(gateway, None, reason)

    def _flush(self, reason: str) -> None:
        """Ends everything the planner holds with one code, whatever is in flight."""
        self._abort_all(reason)
        if self.planner is not None:
            self._reply(self.planner.lost(0, ordered=True, now=time.monotonic()))

    def _announce(self) -> None:
        self.log("state", state=self.state)
        self.gateways.broadcast(self.status())

    def _tick(self) -> None:
        """Deadlines and silences of others, and a canary when it is due."""
        now = time.monotonic()
        stalled = now - self._ticked_at > self._tick_s + STALL_S
        self._ticked_at = now
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        if not stalled:
            self.ranks.check(now)
            self.gateways.check(now)
        if self._ranks_are_away(now) and self.stats.pending_requests:
            self._abort_all(RANKS_AWAY)
        self._pump()


async def serve(
    *,
    config: SchedulerConfig,
    replica: str,
    model: str,
    tensor_parallel_size: int,
    run_dir: Path,
    stop: asyncio.Event,
    log: Log,
    end_rank: Callable[[int], object],
) -> None:
    """Runs one replica's scheduler until `stop` is set, then drains. Raises ipc.sockets.EndpointInUse.

    `end_rank` is called, and must not block, for a rank that has not said Hello in time.

    An error of our own ends it too, and is raised: gateways turn to other replicas, ranks keep their weights for the
    successor. That beats going on with requests that nobody would ever answer.
    """
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[None] = loop.create_future()
    scheduler = Scheduler(config, replica, model, tensor_parallel_size, run_dir, log, end_rank)

    def on_exception(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        log("internal_error", level="error", error=f"{type(error).__name__}: {error}")
        if not failure.done():
            failure.set_exception(error)

    async def live() -> None:
        await stop.wait()
        await scheduler.drain()

    loop.set_exception_handler(on_exception)
    life = asyncio.ensure_future(live())
    try:
        await asyncio.wait({life, failure}, return_when=asyncio.FIRST_COMPLETED)
        (failure if failure.done() else life).result()
    finally:
        life.cancel()
        loop.set_exception_handler(None)
        scheduler.close()
