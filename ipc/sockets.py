"""The ZeroMQ sockets in use: a ROUTER that binds, a DEALER that connects, and their face to an event loop.

Rules kept here: no message is dropped in silence (a full or vanished peer is an exception), an endpoint in use
is refused instead of stolen, nothing lingers at exit, every queue is bounded. The descriptor of a ZeroMQ
socket is edge-triggered, so `EventSocket` drains after every wake-up and after every send.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

HIGH_WATER_MARK = 4096  # messages per peer and direction
MAX_MESSAGE_BYTES = 256 << 20
MAX_DRAIN = 64  # messages handled before the loop may do other things

Frame = bytes | bytearray | memoryview


class SocketError(RuntimeError):
    """Base of what can go wrong when binding or sending."""


class EndpointInUse(SocketError):
    """Another live process is bound there."""


class PeerFull(SocketError):
    """The peer's queue is at its high-water mark; the message was not sent."""


class PeerGone(SocketError):
    """Nobody is connected under that identity (or at all); the message was not sent."""


class Socket:
    """A ZeroMQ socket with this project's options, and the lock of its endpoint where it binds."""

    def __init__(self, socket: "zmq.Socket[bytes]", lock_fd: int = -1) -> None:
        self.raw = socket
        self._lock_fd = lock_fd

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends now or raises PeerFull / PeerGone. On a ROUTER frame 0 is the peer's identity."""
        try:
            self.raw.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            raise PeerFull("peer's queue is full or not connected") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone("no such peer") from None
            raise

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none."""
        try:
            return self.raw.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def close(self) -> None:
        self.raw.close(linger=0)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def router(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> Socket:
    """Binds a ROUTER. Raises EndpointInUse if a live process has it (ZeroMQ itself would steal an ipc path)."""
    lock_fd = _lock(endpoint)
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if lock_fd >= 0:
            os.close(lock_fd)
        raise EndpointInUse(f"cannot bind {endpoint}: {error}") from None
    return Socket(socket, lock_fd)


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

    An exception from `on_message` is the loop's exception handler's; the socket goes on.
    """

    def __init__(
        self, socket: Socket, on_message: Callable[[list[bytes]], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.socket = socket
        self._on_message = on_message
        self._loop = loop
        self._scheduled = False
        self._closed = False
        loop.add_reader(socket.raw.fileno(), self._drain)
        self._drain_soon()

    def send(self, frames: Sequence[Frame]) -> None:
        """As Socket.send; also looks for messages afterwards, since sending can swallow the wake-up."""
        self.socket.send(frames)
        self._drain_soon()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self.socket.raw.fileno())
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


def _lock(endpoint: str) -> int:
    """Takes the lock file beside an ipc endpoint; -1 for other transports, which refuse twins themselves."""
    if not endpoint.startswith("ipc://"):
        return -1
    path = Path(endpoint.removeprefix("ipc://") + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    os.close(fd)
    raise EndpointInUse(f"{endpoint} is in use by a live process (lock {path})")
