"""The link to the gateways: who they are, what they ask, and the way back.

A gateway is known by its incarnation from its first message on. A reply that a full socket does not take waits in a
bounded backlog; a gateway whose backlog overflows, that is silent or unreachable, is gone and its work with it. What
could not be delivered is counted, never lost in silence. Knows nothing of planners and ranks.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from ipc.codec import TO_SCHEDULER, DecodeError, encode
from ipc.control import PROBE_INDEX, Heartbeat, Hello, ProcessStats, Quarantine, Status
from ipc.sockets import Context, EventSocket, Frame, PeerFull, SocketError, router
from ipc.submit import Abort, Rejected, Submit
from ipc.types import PROTOCOL_VERSION, new_incarnation
from scheduler.config import SchedulerConfig
from scheduler.planner import Reply
from scheduler.stats import Stats

MAX_BACKLOG = 4096  # messages; the socket itself holds as many again


class GatewayEvents(Protocol):
    """What the link asks of the loop."""

    def on_submit(self, submit: Submit, frame: bytes) -> None: ...

    def on_abort(self, gateway: int, chunk_id: int | None, reason: str) -> None: ...

    def on_quarantine(self, message: Quarantine) -> None: ...

    def status(self) -> Status: ...

    def quarantine_entries(self) -> list[Quarantine]: ...


class Gateway:
    """One registered gateway."""

    def __init__(self, identity: bytes, incarnation: int, now: float, socket: EventSocket) -> None:
        self.identity = identity
        self.socket = socket  # on which it is heard
        self.incarnation = incarnation
        self.registration = new_incarnation()  # it learns from another one that we had dropped it
        self.heard_at = now
        self.stats: ProcessStats | None = None
        self.backlog: deque[list[Frame]] = deque()


class GatewayLink:
    def __init__(
        self,
        context: Context,
        endpoint: str,
        incarnation: int,
        config: SchedulerConfig,
        stats: Stats,
        events: GatewayEvents,
        log: Callable[..., None],
    ) -> None:
        """Raises ipc.sockets.EndpointInUse if another scheduler serves this replica."""
        self._incarnation = incarnation
        self._silence_s = config.gateway_heartbeat_ms / 1000
        self._stats = stats
        self._events = events
        self._log = log
        self._gateways: dict[int, Gateway] = {}  # by incarnation
        self._sockets: list[EventSocket] = []
        try:
            self._listen(context, endpoint, config.spin_us)
            if config.listen is not None:
                self._listen(context, config.listen, config.spin_us)
        except SocketError:
            self.close()
            raise

    # --- for the loop ---------------------------------------------------------------------------------------

    @property
    def incarnations(self) -> list[int]:
        return list(self._gateways)

    @property
    def process_stats(self) -> list[ProcessStats]:
        return [gateway.stats for gateway in self._gateways.values() if gateway.stats is not None]

    def reply(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            gateway = self._gateways.get(reply.gateway)
            if gateway is None:
                self._stats.num_undeliverable += 1
                continue
            body: list[Frame] = [gateway.identity, encode(reply.message)]
            if reply.payload is not None:
                body.append(reply.payload)
            self._send(gateway, body)

    def broadcast(self, message: Struct) -> None:
        for gateway in list(self._gateways.values()):
            self._send(gateway, [gateway.identity, encode(_addressed(message, gateway))])

    def check(self, now: float) -> None:
        """Retries what waits, and lets go of the silent. Messages that have arrived count first."""
        for socket in self._sockets:
            while (frames := socket.socket.receive()) is not None:
                self._on_message(socket, frames)
        for gateway in list(self._gateways.values()):
            self._flush(gateway)
            if now - gateway.heard_at > self._silence_s:
                self._drop(gateway, f"silent for {self._silence_s:g} s (gateway_heartbeat_ms)")

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def _listen(self, context: Context, endpoint: str, spin_us: int) -> None:
        def on_message(frames: list[bytes]) -> None:
            self._on_message(socket, frames)

        socket = EventSocket(router(context, endpoint), on_message, asyncio.get_running_loop(), spin_us=spin_us)
        self._sockets.append(socket)

    # --- messages -------------------------------------------------------------------------------------------

    def _on_message(self, socket: EventSocket, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            message = TO_SCHEDULER.decode(frames[1])
        except (DecodeError, IndexError):
            self._stats.stale["gateway"] += 1
            return
        match message:
            case Submit():
                self._on_submit(socket, message, frames)
            case Abort():
                if message.scheduler == self._incarnation:
                    self._events.on_abort(message.gateway, message.chunk_id, message.reason)
                else:
                    self._stats.stale["gateway"] += 1
            case Hello() | Heartbeat():
                self._on_sign_of_life(socket, identity, message)
            case Quarantine():
                self._events.on_quarantine(message)

    def _on_submit(self, socket: EventSocket, submit: Submit, frames: list[bytes]) -> None:
        gateway = self._register(socket, frames[0], submit.gateway)
        if submit.scheduler != self._incarnation:
            self._stats.stale["gateway"] += 1
            self._stats.requests["stale"] += 1
            message = "meant for another incarnation of this scheduler: say Hello and send it again"
            rejected = Rejected(submit.gateway, submit.chunk_id, "stale", message, attempt=submit.attempt)
            self._send(gateway, [gateway.identity, encode(rejected)])
            return
        self._events.on_submit(submit, frames[2] if len(frames) == 3 else b"")

    def _on_sign_of_life(self, socket: EventSocket, identity: bytes, message: Hello | Heartbeat) -> None:
        if isinstance(message, Hello) and (message.role != "gateway" or message.protocol != PROTOCOL_VERSION):
            reason = f"role {message.role}, protocol {message.protocol}: expected gateway, {PROTOCOL_VERSION}"
            self._log("hello_refused", level="warning", pid=message.pid, reason=reason)
            return
        status = self._events.status()
        if isinstance(message, Hello) and message.index == PROBE_INDEX:
            with contextlib.suppress(SocketError):  # it asks again, or has gone
                socket.send([identity, encode(status)])
            return
        gateway = self._register(socket, identity, message.incarnation)
        if isinstance(message, Heartbeat) and message.stats is not None:
            gateway.stats = message.stats
        self._send(gateway, [identity, encode(_addressed(status, gateway))])

    # --- gateways -------------------------------------------------------------------------------------------

    def _register(self, socket: EventSocket, identity: bytes, incarnation: int) -> Gateway:
        now = time.monotonic()
        gateway = self._gateways.get(incarnation)
        if gateway is not None:
            gateway.identity, gateway.heard_at, gateway.socket = identity, now, socket
            return gateway
        for other in [other for other in self._gateways.values() if other.identity == identity]:
            self._drop(other, "its successor took its place")
        gateway = self._gateways[incarnation] = Gateway(identity, incarnation, now, socket)
        self._log("gateway_joined", gateway=f"{incarnation:x}")
        for entry in self._events.quarantine_entries():
            self._send(gateway, [identity, encode(entry)])
        return gateway

    def _drop(self, gateway: Gateway, reason: str) -> None:
        if self._gateways.pop(gateway.incarnation, None) is None:
            return
        self._stats.num_undeliverable += len(gateway.backlog)
        gateway.backlog.clear()  # what else is meant for it is counted when sending fails
        self._log("gateway_gone", gateway=f"{gateway.incarnation:x}", reason=reason)
        self._events.on_abort(gateway.incarnation, None, "its gateway is gone")

    def _send(self, gateway: Gateway, frames: list[Frame]) -> None:
        if gateway.backlog:
            self._flush(gateway)
        if gateway.backlog:
            gateway.backlog.append(frames)
            if len(gateway.backlog) > MAX_BACKLOG:
                self._drop(gateway, f"it left {MAX_BACKLOG} messages untaken")
            return
        try:
            gateway.socket.send(frames)
        except PeerFull:
            gateway.backlog.append(frames)
        except SocketError:
            self._stats.num_undeliverable += 1
            self._drop(gateway, "unreachable")

    def _flush(self, gateway: Gateway) -> None:
        """Sends what waits, in order, as far as the socket takes it."""
        while gateway.backlog:
            try:
                gateway.socket.send(gateway.backlog[0])
            except PeerFull:
                return
            except SocketError:
                self._drop(gateway, "unreachable")
                return
            gateway.backlog.popleft()


def _addressed(message: Struct, gateway: Gateway) -> Struct:
    return replace(message, registration=gateway.registration) if isinstance(message, Status) else message
