"""The ZeroMQ sockets in use: a ROUTER that binds, a DEALER that connects, and their face to an event loop.

Rules kept here: no message is dropped in silence (a full or vanished peer is an exception), an endpoint in use
is refused instead of stolen, nothing lingers at exit, every queue is bounded. The descriptor of a ZeroMQ
socket is edge-triggered, so `EventSocket` drains after every wake-up and after every send.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from ipc.connection_monitor import ConnectionMonitor
from ipc.endpoint_lock import EndpointInUse, EndpointLock, SocketError

__all__ = ["EndpointInUse", "EventSocket", "PeerFull", "PeerGone", "Socket", "SocketError", "dealer", "router"]

HIGH_WATER_MARK = 4096  # messages per peer and direction
MAX_MESSAGE_BYTES = 256 << 20
MAX_DRAIN = 64  # messages handled before the loop may do other things

Frame = bytes | bytearray | memoryview


class PeerFull(SocketError):
    """The peer's queue is at its high-water mark, or a DEALER is not connected; the message was not sent."""


class PeerGone(SocketError):
    """Nobody is connected under that identity; the message was not sent."""


class MessageTooLarge(SocketError):
    """A frame is beyond MAX_MESSAGE_BYTES: the receiver would cut the connection instead of taking it."""


class Socket:
    """A ZeroMQ socket with this project's options, and the lock of its endpoint where it binds."""

    def __init__(self, socket: "zmq.Socket[bytes]", lock: EndpointLock | None = None, path: Path | None = None) -> None:
        self.raw = socket
        self._lock = lock
        self._path = path

    def bind(self, endpoint: str) -> None:
        """A further endpoint of a ROUTER, tcp:// say. Raises EndpointInUse."""
        try:
            self.raw.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointInUse(f"cannot bind {endpoint}: {error}") from None

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends now or raises PeerFull, PeerGone or MessageTooLarge. On a ROUTER frame 0 is the peer's identity."""
        for frame in frames:
            num_bytes = frame.nbytes if isinstance(frame, memoryview) else len(frame)
            if num_bytes > MAX_MESSAGE_BYTES:
                raise MessageTooLarge(f"a frame of {num_bytes} bytes, the limit is {MAX_MESSAGE_BYTES}")
        try:
            self.raw.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError:
            self._send_again(frames)

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none."""
        try:
            return self.raw.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def close(self) -> None:
        self.raw.close(linger=0)
        if self._lock is not None and self._path is not None:
            self._path.unlink(missing_ok=True)  # ZeroMQ leaves it
            self._lock.release()
            self._lock = None

    def _send_again(self, frames: Sequence[Frame]) -> None:
        """A send looks at news from its peers (room again, connected) at most once a millisecond: look, try again."""
        self.raw.getsockopt(zmq.EVENTS)
        try:
            self.raw.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            raise PeerFull("peer's queue is full or not connected") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone("no such peer") from None
            raise


def router(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> Socket:
    """Binds a ROUTER. Raises EndpointInUse if a live process has it (ZeroMQ itself would steal an ipc path)."""
    path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
    lock = EndpointLock(path) if path is not None else None
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if lock is not None:
            lock.release()
        raise EndpointInUse(f"cannot bind {endpoint}: {error}") from None
    return Socket(socket, lock, path)


def dealer(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, identity: bytes) -> Socket:
    """Connects a DEALER, which reconnects by itself; sends fail (PeerFull) while nobody is connected."""
    socket = _socket(context, zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(endpoint)
    return Socket(socket)


class EventSocket:
    """A Socket on an asyncio loop: calls `on_message(frames)` for every message, in order.

    `on_connection(connected)`, where given, hears when a DEALER's peer comes and goes (a peer that hangs stays
    connected). An exception from either is the loop's exception handler's; the socket goes on.
    """

    def __init__(
        self,
        socket: Socket,
        on_message: Callable[[list[bytes]], None],
        loop: asyncio.AbstractEventLoop,
        on_connection: Callable[[bool], None] | None = None,
    ) -> None:
        self.socket = socket
        self._on_message = on_message
        self._loop = loop
        self._scheduled = False
        self._closed = False
        self._monitor = ConnectionMonitor(socket.raw, on_connection, loop) if on_connection else None
        loop.add_reader(socket.raw.fileno(), self._drain)
        self._drain_soon()

    def send(self, frames: Sequence[Frame]) -> None:
        """As Socket.send; also looks for messages afterwards, since sending can swallow the wake-up."""
        try:
            self.socket.send(frames)
        finally:
            self._drain_soon()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self.socket.raw.fileno())
            if self._monitor is not None:
                self._monitor.close()
            self.socket.close()

    def _drain_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(MAX_DRAIN):
            if self._closed:
                return
            frames = self.socket.receive()
            if frames is None:
                return
            try:
                self._on_message(frames)
            except Exception as error:  # noqa: BLE001 - one message must not deafen the socket
                self._loop.call_exception_handler({"message": "on_message failed", "exception": error})
        self._drain_soon()


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket
