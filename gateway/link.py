"""One replica's scheduler as this gateway sees it: its socket, its state, and the chunks in flight there.

Knows nothing of models or of other replicas: what is lost here is handed to the owner, who sends it elsewhere.

    unknown ──Hello every 500 ms──► Status ──► known (Heartbeat every 500 ms, Status comes back)
       ▲                                         │
       └── disconnected · silent for 3 s · a new incarnation or registration: all in flight is lost ──┘

The same goes for a standstill of our own: the scheduler may have given us up, and would never answer.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from gateway.job import AbortReason, Chunk
from ipc.codec import TO_GATEWAY, DecodeError, encode
from ipc.control import Heartbeat, Hello, ProcessStats, Quarantine, Status
from ipc.sockets import Context, EventSocket, Frame, SocketError, dealer
from ipc.submit import Abort, Rejected, Result, Submit, TokenChunk
from ipc.types import ModelFacts

HEARTBEAT_S = 0.5
SILENCE_S = 3.0  # less than the shortest gateway_heartbeat_ms that services allows


class Sender(Struct, frozen=True):
    """Who this gateway is."""

    incarnation: int
    index: int
    spin_us: int = 0  # how long its loop stays awake after a message

    @property
    def identity(self) -> bytes:
        return b"gw-" + self.incarnation.to_bytes(8, "big")


class LinkOwner(Protocol):
    """Who decides what becomes of a link's chunks."""

    def on_state(self, link: "Link") -> None:
        """The replica became ready, or ceased to be."""

    def on_facts(self, link: "Link", facts: ModelFacts) -> None:
        """The replica told what its model is, for the first time or otherwise than before."""

    def on_lost(self, link: "Link", chunks: list[Chunk]) -> None:
        """These were in flight and will not be answered."""

    def on_rejected(self, link: "Link", chunk: Chunk, message: Rejected) -> None:
        """The scheduler gave this one back."""

    def on_broken(self, link: "Link", chunk: Chunk, text: str) -> None:
        """The answer to this one cannot be used."""

    def on_quarantine(self, link: "Link", message: Quarantine) -> None:
        """To be told to the model's other schedulers."""

    def on_late(self) -> None:
        """A reply to a chunk that is no longer awaited was dropped."""


class Link:
    def __init__(
        self,
        context: Context,
        replica: str,
        endpoint: str,
        sender: Sender,
        owner: LinkOwner,
        next_chunk_id: Callable[[], int],
    ) -> None:
        self.replica = replica
        self.endpoint = endpoint
        self.in_flight: dict[int, Chunk] = {}
        self.outstanding_tokens = 0
        self.reported_tokens = 0
        self.incarnation: int | None = None
        self.status: Status | None = None
        self.facts: ModelFacts | None = None
        self.retiring = False  # draining, or no longer listed: it finishes what it has
        self._accepting = False
        self._closed = False
        self._owner = owner
        self._sender = sender
        self._next_chunk_id = next_chunk_id
        self._loop = asyncio.get_running_loop()
        self._status_at = 0.0
        self._ticked_at = self._loop.time()
        socket = dealer(context, endpoint, sender.identity)
        self._socket = EventSocket(socket, self._on_message, self._loop, self._on_connection, sender.spin_us)

    @property
    def live(self) -> bool:
        """Whether new chunks may be sent there."""
        return self._accepting and not self.retiring and not self._closed

    @property
    def ready(self) -> bool:
        return self.status is not None and self.status.state == "ready"

    @property
    def forward_age_ms(self) -> float:
        """Since the replica's last finished step; infinite when it never finished one."""
        if self.status is None or self.status.forward_age_ms < 0:
            return float("inf")
        return self.status.forward_age_ms + (self._loop.time() - self._status_at) * 1000

    @property
    def is_stale(self) -> bool:
        """Whether its last finished step is longer ago than its scheduler would let a step take."""
        return self.status is None or self.forward_age_ms > self.status.max_forward_age_ms

    def submit(self, chunk: Chunk) -> None:
        """Sends `chunk` under a new id. Raises SocketError, or OverflowError for a header beyond 64 bits."""
        assert self.incarnation is not None, "submit only to a live link"
        chunk_id = self._next_chunk_id()
        work = chunk.input
        header = Submit(
            gateway=self._sender.incarnation,
            scheduler=self.incarnation,
            chunk_id=chunk_id,
            lengths=work.lengths,
            timeout_ms=max(1, int((chunk.deadline - self._loop.time()) * 1000)),
            spec=chunk.spec,
            type_starts=work.type_starts,
            priority=chunk.priority,
            attempt=chunk.attempt,
            sampling=chunk.sampling,
            cache_salt=chunk.cache_salt,
        )
        self._socket.send([encode(header), work.frame])
        chunk.chunk_id, chunk.carrier = chunk_id, self
        self.in_flight[chunk_id] = chunk
        self.outstanding_tokens += work.num_tokens

    def abort(self, chunk: Chunk, reason: AbortReason) -> None:
        """Forgets `chunk` and tells the scheduler, if that is possible."""
        if self._release(chunk.chunk_id) is not None and self.incarnation is not None:
            self._try_send(encode(Abort(self._sender.incarnation, self.incarnation, chunk.chunk_id, reason)))

    def tick(self, now: float, stats: ProcessStats) -> None:
        """Every HEARTBEAT_S: says hello or proves that this process lives, and ejects a silent scheduler."""
        stood_still, self._ticked_at = now - self._ticked_at > SILENCE_S, now
        if self.incarnation is None:
            self._say_hello()
            return
        if stood_still or now - self._status_at > SILENCE_S:
            self.eject()
            self._say_hello()
            return
        self._try_send(encode(Heartbeat(self._sender.incarnation, stats=stats)))

    def eject(self) -> None:
        """Takes the replica for dead until its next Status. What was in flight there is lost."""
        lost = list(self.in_flight.values())
        if self.incarnation is not None:  # should it live after all, it need not work for nobody
            for chunk in lost:
                self._try_send(encode(Abort(self._sender.incarnation, self.incarnation, chunk.chunk_id)))
        for chunk in lost:
            chunk.carrier = None
        self.in_flight.clear()
        self.outstanding_tokens = 0
        self.incarnation = None
        self.status = None
        self._set_accepting(False)
        if lost:
            self._owner.on_lost(self, lost)

    def forward(self, message: Quarantine) -> None:
        self._try_send(encode(message))

    def close(self) -> None:
        """Whatever is still in flight is lost."""
        self._closed = True
        self.eject()
        self._socket.close()

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            message = TO_GATEWAY.decode(frames[0])
        except DecodeError:
            self._owner.on_late()
            return
        match message:
            case TokenChunk():
                self._on_tokens(message)
            case Result():
                self._on_result(message, frames)
            case Status():
                self._on_status(message)
            case Rejected():
                self._on_rejected(message)
            case Quarantine():
                self._owner.on_quarantine(self, message)

    def _on_tokens(self, message: TokenChunk) -> None:
        mine = message.gateway == self._sender.incarnation
        for delta in message.deltas:
            chunk = self.in_flight.get(delta.chunk_id) if mine else None
            if chunk is None:
                self._owner.on_late()
                continue
            if delta.finish_reason is not None:
                self._release(delta.chunk_id)
            chunk.job.tokens(chunk, delta)

    def _on_result(self, message: Result, frames: list[bytes]) -> None:
        chunk = self._release(message.chunk_id) if message.gateway == self._sender.incarnation else None
        if chunk is None:
            self._owner.on_late()
            return
        payload = frames[1] if len(frames) > 1 else b""
        if message.num_rows != len(chunk.input.lengths) or len(payload) != message.num_rows * message.row_bytes:
            told = f"{len(payload)} bytes for {message.num_rows} rows of {message.row_bytes}"
            self._owner.on_broken(self, chunk, told)
            return
        chunk.job.succeeded(chunk, payload, message.row_bytes, message.timings)

    def _on_rejected(self, message: Rejected) -> None:
        chunk = self._release(message.chunk_id) if message.gateway == self._sender.incarnation else None
        if chunk is None:
            if message.code != "aborted":
                self._owner.on_late()
            return
        if message.code == "stale":  # it is another life of this scheduler than we thought
            self.eject()
            self._say_hello()
        elif message.code in ("draining", "not_ready"):
            self._set_accepting(False)  # until its Status says otherwise
        self._owner.on_rejected(self, chunk, message)

    def _on_status(self, message: Status) -> None:
        told = (message.incarnation, message.registration)
        if self.status is not None and told != (self.status.incarnation, self.status.registration):
            self.eject()
        self.incarnation = message.incarnation
        self.status = message
        self._status_at = self._loop.time()
        self.reported_tokens = message.num_tokens
        if message.facts is not None and message.facts != self.facts:
            self.facts = message.facts
            self._owner.on_facts(self, message.facts)
        self._set_accepting(message.state == "ready" and self.facts is not None)

    def _on_connection(self, connected: bool) -> None:
        if not connected:
            self.eject()
        elif self.incarnation is None:
            self._say_hello()

    def _set_accepting(self, accepting: bool) -> None:
        if accepting != self._accepting:
            self._accepting = accepting
            self._owner.on_state(self)

    def _release(self, chunk_id: int) -> Chunk | None:
        chunk = self.in_flight.pop(chunk_id, None)
        if chunk is not None:
            self.outstanding_tokens -= chunk.input.num_tokens
            chunk.carrier = None
        return chunk

    def _say_hello(self) -> None:
        self._try_send(encode(Hello(self._sender.incarnation, "gateway", self._sender.index, os.getpid())))

    def _try_send(self, *frames: Frame) -> None:
        """What cannot be sent now is not worth waiting for: the next tick says it again, or nobody listens."""
        with contextlib.suppress(SocketError):
            self._socket.send(frames)
