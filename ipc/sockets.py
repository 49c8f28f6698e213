"""The sockets between processes: a ROUTER that binds, a DEALER that connects, and their face to an event loop.

On one host (`ipc://path`) messages go over Unix sockets (ipc.local_socket), between hosts (`tcp://host:port`) over
ZeroMQ (ipc.tcp_socket). Rules kept by both: no message is dropped in silence (a full or vanished peer is an
exception, the end of a connection is told), an endpoint in use is refused instead of stolen, peers are heard in turn,
nothing lingers at exit, every queue is bounded.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ipc.local_socket import LocalDealer, LocalRouter
from ipc.socket_errors import (
    MAX_MESSAGE_BYTES,
    EndpointInUse,
    Frame,
    MessageTooLarge,
    PeerFull,
    PeerGone,
    SocketError,
)
from ipc.tcp_socket import Context, TcpSocket, tcp_dealer, tcp_router

__all__ = [
    "MAX_MESSAGE_BYTES", "Context", "EndpointInUse", "EventSocket", "Frame", "MessageTooLarge", "PeerFull", "PeerGone",
    "Socket", "SocketError", "dealer", "router",
]  # fmt: skip

MAX_DRAIN = 64  # messages handled before the loop may do other things

Socket = LocalRouter | LocalDealer | TcpSocket


def router(context: Context, endpoint: str) -> LocalRouter | TcpSocket:
    """Binds a ROUTER; frame 0 of every message is the peer's identity. Raises EndpointInUse if it is taken."""
    path = endpoint.removeprefix("ipc://")
    return LocalRouter(Path(path)) if path != endpoint else tcp_router(context, endpoint)


def dealer(context: Context, endpoint: str, identity: bytes) -> LocalDealer | TcpSocket:
    """Connects a DEALER, which reconnects; sends fail (PeerFull) while nobody is connected."""
    path = endpoint.removeprefix("ipc://")
    return LocalDealer(Path(path), identity) if path != endpoint else tcp_dealer(context, endpoint, identity)


class EventSocket:
    """A Socket on an asyncio loop: calls `on_message(frames)` for every message, in order.

    `on_connection(connected)`, where given, hears when a DEALER's peer comes and goes (a peer that hangs stays
    connected). An exception from either is the loop's exception handler's; the socket goes on. With `spin_us` the
    loop does not sleep for so long after each message, in or out: that spares it the wake-up, and costs a core.
    """

    def __init__(
        self,
        socket: Socket,
        on_message: Callable[[list[bytes]], None],
        loop: asyncio.AbstractEventLoop,
        on_connection: Callable[[bool], None] | None = None,
        spin_us: int = 0,
    ) -> None:
        self.socket = socket
        self._on_message = on_message
        self._on_connection = on_connection
        self._loop = loop
        self._scheduled = False
        self._closed = False
        self._connected = False
        self._connection = 0
        self._retry: asyncio.TimerHandle | None = None
        self._spin_s = spin_us / 1e6
        self._spin_until = 0.0
        self._spinning = False
        watched = on_connection is not None and isinstance(socket, TcpSocket)
        self._monitor = socket.watch(self._changed, loop) if watched else None  # type: ignore[union-attr]
        loop.add_reader(socket.fileno(), self._drain)
        self._drain_soon()

    def send(self, frames: Sequence[Frame]) -> None:
        """As Socket.send; also looks for messages afterwards where sending can swallow the wake-up."""
        try:
            self.socket.send(frames)
        except SocketError:
            self._drain_soon()
            raise
        if self.socket.edge_triggered:
            self._drain_soon()
        self._stay_awake()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self.socket.fileno())
            if self._retry is not None:
                self._retry.cancel()
            if self._monitor is not None:
                self._monitor.close()
            self.socket.close()

    def _drain_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        receive = self.socket.receive
        for _ in range(MAX_DRAIN):
            if self._closed:
                return
            frames = receive()
            if not self.socket.edge_triggered:
                receive = self.socket.next_read  # what comes later will wake the loop again
            if frames is None:
                self._look_at_connection()
                return
            self._stay_awake()
            try:
                self._on_message(frames)
            except Exception as error:  # noqa: BLE001 - one message must not deafen the socket
                self._loop.call_exception_handler({"message": "on_message failed", "exception": error})
        self._drain_soon()

    def _look_at_connection(self) -> None:
        if self.socket.retry_s is not None and self._retry is None:
            self._retry = self._loop.call_later(self.socket.retry_s, self._try_again)
        connection = self.socket.connection
        if connection is not None and connection != self._connection:
            self._connection = connection
            self._changed(False)  # one may have ended and the next begun before we looked
            self._changed(connection != 0)

    def _try_again(self) -> None:
        self._retry = None
        self._drain()

    def _changed(self, connected: bool) -> None:
        if connected != self._connected and not self._closed:
            self._connected = connected
            if self._on_connection is not None:
                self._on_connection(connected)

    def _stay_awake(self) -> None:
        if self._spin_s:
            self._spin_until = time.monotonic() + self._spin_s
            if not self._spinning:
                self._spinning = True
                self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        self._spinning = time.monotonic() < self._spin_until and not self._closed
        if self._spinning:
            self._loop.call_soon(self._spin)
