"""The gateway's side of all schedulers: picks a replica for each chunk, and another one when that fails.

A chunk is always in exactly one place: in flight on a link, waiting for a replica, or done. A chunk that no
replica can take now waits if one was there a short while ago.
"""

import asyncio
import itertools
from collections.abc import Mapping

import zmq

from gateway.balance import least_outstanding
from gateway.errors import InternalError, NotReady, from_rejected
from gateway.generate_job import ChoiceInput, Generation, Keeping
from gateway.job import Chunk, Job
from gateway.link import HEARTBEAT_S, Link, Sender
from gateway.metrics import Metrics
from gateway.replicas import Replica
from gateway.split import ChunkInput
from ipc.control import ProcessStats, Quarantine
from ipc.sockets import SocketError
from ipc.submit import Rejected
from ipc.types import MAX_ATTEMPTS, ModelFacts, OutputSpec, Priority

RECENTLY_S = 60.0  # a replica that was there within this time is expected back
RETRY_AFTER_MS = 1000
MAX_CONVICTS = 1024  # remembered for each model


class ModelLinks:
    """The replicas of one model, and the chunks that wait for one of them (with the time since when)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.links: dict[str, Link] = {}  # by replica, as listed
        self.waiting: dict[Chunk, float] = {}
        self.facts: ModelFacts | None = None
        self.live_at: float | None = None  # when a replica was last known to be live
        self.changed = asyncio.Event()
        self._convicts: dict[bytes, float] = {}  # quarantined fingerprint → until when

    def live_links(self) -> list[Link]:
        return [link for link in self.links.values() if link.live]

    def expected(self, now: float) -> bool:
        """Whether it is worth waiting for a replica."""
        return self.live_at is not None and now - self.live_at < RECENTLY_S

    def remember(self, message: Quarantine, now: float) -> None:
        """A scheduler forgets its quarantine when it dies; gateways tell its successor."""
        for found in message.fingerprints:
            self._convicts.pop(found, None)
            self._convicts[found] = now + message.ttl_ms / 1000
        for found in list(self._convicts)[:-MAX_CONVICTS]:
            del self._convicts[found]

    def quarantines(self, now: float) -> list[Quarantine]:
        """What is remembered and still holds."""
        left_ms = {found: int((until - now) * 1000) for found, until in self._convicts.items()}
        return [Quarantine([found], ttl_ms) for found, ttl_ms in left_ms.items() if ttl_ms > 0]

    def forget(self, chunk: Chunk) -> None:
        self.waiting.pop(chunk, None)

    def not_ready(self) -> NotReady:
        return NotReady(
            f"no replica of model {self.name!r} is ready; try again later", param="model", retry_after_ms=RETRY_AFTER_MS
        )


class SchedulerClient:
    """Owns every link. Handlers call `facts`, `start` and `generate`; the rest is for the process around them."""

    def __init__(self, models: list[str], sender: Sender, replica_wait_ms: int, metrics: Metrics) -> None:
        self._models = {name: ModelLinks(name) for name in models}
        self._by_link: dict[Link, ModelLinks] = {}  # those that finish their last chunks included
        self._sender = sender
        self._replica_wait_s = replica_wait_ms / 1000
        self._metrics = metrics
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._chunk_ids = itertools.count(1)
        self._turns = itertools.count()
        self._closing = False
        self._ticker = self._loop.call_later(HEARTBEAT_S, self._tick)

    def facts(self, name: str) -> ModelFacts:
        """The model's facts. Raises NotReady when no replica is there nor expected back soon."""
        model = self._models[name]
        if model.facts is None or not model.expected(self._loop.time()):
            raise model.not_ready()
        return model.facts

    def num_live(self, name: str) -> int:
        return len(self._models[name].live_links())

    def start(self, name: str, inputs: list[ChunkInput], spec: OutputSpec, priority: Priority, deadline: float) -> Job:
        """Sends a request's chunks; `job.future` ends with its rows or a GatewayError."""
        model = self._models[name]
        job = Job(inputs, spec, priority, deadline, model.forget, self._loop)
        for chunk in job.chunks:
            self._dispatch(model, chunk)
        return job

    def generate(
        self, name: str, choices: list[ChoiceInput], priority: Priority, deadline: float, keeping: Keeping
    ) -> Generation:
        """Sends a request's choices, each a chunk of its own; what becomes of them is read from the Generation."""
        model = self._models[name]
        generation = Generation(choices, priority, deadline, keeping, model.forget)
        for chunk in generation.chunks:
            self._dispatch(model, chunk)
        return generation

    def update(self, replicas: Mapping[str, list[Replica]]) -> None:
        """Takes a new list of replicas: connects new ones, retires those that drain or are gone."""
        for name, model in self._models.items():
            listed = {replica.id: replica for replica in replicas.get(name, [])}
            for link in list(model.links.values()):
                replica = listed.get(link.replica)
                if replica is None or replica.endpoint != link.endpoint:
                    link.retiring = True
                    del model.links[link.replica]
            for replica in listed.values():
                if replica.id not in model.links:
                    self._connect(model, replica)
                model.links[replica.id].retiring = replica.state == "draining"
            self._dispatch_waiting(model)
        self._close_idle()

    def links(self) -> dict[str, list[Link]]:
        """Listed replicas by model."""
        return {name: list(model.links.values()) for name, model in self._models.items()}

    def known_facts(self, name: str) -> ModelFacts | None:
        return self._models[name].facts

    def own_stats(self) -> ProcessStats:
        """This gateway's figures, as of now."""
        self._metrics.chunks_in_flight = sum(len(link.in_flight) for link in self._by_link)
        self._metrics.chunks_waiting = sum(len(model.waiting) for model in self._models.values())
        return ProcessStats(f"gateway/{self._sender.index}", self._sender.incarnation, self._metrics.values())

    async def wait_known(self, timeout_s: float) -> None:
        """Until a replica of every model is ready, or `timeout_s` are over."""
        try:
            async with asyncio.timeout(timeout_s):
                for model in self._models.values():
                    while not model.live_links():
                        model.changed.clear()
                        await model.changed.wait()
        except TimeoutError:
            return

    def give_up(self) -> None:
        """Fails whatever is in flight or waits, so that its clients are told before the process ends."""
        text = "this gateway is stopping and could not finish this; ask again"
        waiting = [chunk for model in self._models.values() for chunk in model.waiting]
        for chunk in [*waiting, *(chunk for link in self._by_link for chunk in link.in_flight.values())]:
            chunk.job.failed(NotReady(text, code="draining", retry_after_ms=RETRY_AFTER_MS))

    def close(self) -> None:
        """Ends all links; whatever is in flight or waits fails."""
        self._closing = True
        self._ticker.cancel()
        for link in list(self._by_link):
            link.close()
        self._by_link.clear()
        for model in self._models.values():
            self._dispatch_waiting(model)
        self._context.term()

    # ── what links tell ─────────────────────────────────────────────────────────────────────────────────────

    def on_state(self, link: Link) -> None:
        model = self._by_link[link]
        model.live_at = self._loop.time()  # it is live now, or was until now
        model.changed.set()
        if link.live:
            for message in model.quarantines(self._loop.time()):
                link.forward(message)
        self._dispatch_waiting(model)

    def on_facts(self, link: Link, facts: ModelFacts) -> None:
        self._by_link[link].facts = facts

    def on_lost(self, link: Link, chunks: list[Chunk]) -> None:
        self._metrics.failovers += len(chunks)
        for chunk in chunks:
            chunk.attempt += 1
            self._dispatch_again(self._by_link[link], chunk)

    def on_rejected(self, link: Link, chunk: Chunk, message: Rejected) -> None:
        self._metrics.count_rejected(message.code)
        chunk.attempt = max(chunk.attempt, message.attempt)
        model = self._by_link[link]
        if message.code == "full":
            chunk.refused.add(link.replica)
        chunk.given_back |= message.code == "not_ready"
        elsewhere = any(other.replica not in chunk.refused for other in model.live_links())
        if message.code in ("stale", "draining", "not_ready") or (message.code == "full" and elsewhere):
            self._dispatch_again(model, chunk)
        else:
            chunk.job.failed(from_rejected(message, chunk.input.first))

    def on_broken(self, link: Link, chunk: Chunk, text: str) -> None:
        chunk.job.failed(InternalError(f"a replica's answer was not what it said: {text}"))

    def on_quarantine(self, link: Link, message: Quarantine) -> None:
        model = self._by_link[link]
        model.remember(message, self._loop.time())
        for other in model.links.values():
            if other is not link:
                other.forward(message)

    def on_late(self) -> None:
        self._metrics.late_replies += 1

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _dispatch(self, model: ModelLinks, chunk: Chunk) -> None:
        """Puts `chunk` in its next place."""
        if chunk.cancelled:
            return
        if chunk.attempt > MAX_ATTEMPTS:
            message = f"{MAX_ATTEMPTS} replicas were lost while they worked on this; try again later"
            chunk.job.failed(NotReady(message, code="replica_lost", retry_after_ms=RETRY_AFTER_MS))
            return
        while link := least_outstanding(self._candidates(model, chunk), next(self._turns)):
            try:
                link.submit(chunk)
                return
            except SocketError:
                link.eject()  # gone, or its queue is full of what it does not take
        if self._closing or not model.expected(self._loop.time()):
            chunk.job.failed(model.not_ready())
        else:
            model.waiting[chunk] = self._loop.time()

    def _dispatch_again(self, model: ModelLinks, chunk: Chunk) -> None:
        """For a chunk that was on a link and came back unanswered."""
        if chunk.job.may_restart(chunk):
            self._dispatch(model, chunk)

    def _candidates(self, model: ModelLinks, chunk: Chunk) -> list[Link]:
        if self._closing:
            return []
        return [link for link in model.links.values() if link.live and link.replica not in chunk.refused]

    def _dispatch_waiting(self, model: ModelLinks) -> None:
        if model.waiting and (self._closing or model.live_links()):
            waiting, model.waiting = model.waiting, {}
            for chunk in waiting:
                self._dispatch(model, chunk)

    def _connect(self, model: ModelLinks, replica: Replica) -> None:
        next_id = self._chunk_ids.__next__
        link = Link(self._context, replica.id, replica.endpoint, self._sender, self, next_id)
        model.links[replica.id] = link
        self._by_link[link] = model

    def _close_idle(self) -> None:
        """Closes links that are no longer listed and have answered everything."""
        for link, model in list(self._by_link.items()):
            if not link.in_flight and model.links.get(link.replica) is not link:
                link.close()
                del self._by_link[link]

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(HEARTBEAT_S, self._tick)
        now = self._loop.time()
        stats = self.own_stats()
        for link, model in list(self._by_link.items()):
            link.tick(now, stats)
            if link.live:
                model.live_at = now
        for model in self._models.values():
            for chunk, since in list(model.waiting.items()):
                patience = RECENTLY_S if chunk.given_back else self._replica_wait_s  # it would have waited there, too
                if now - since > patience and model.waiting.pop(chunk, None) is not None:
                    chunk.job.failed(model.not_ready())
        self._close_idle()
