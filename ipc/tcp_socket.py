"""A ZeroMQ socket between hosts, with this project's options. The rules are those of ipc.sockets."""

import asyncio
from collections.abc import Callable, Sequence

import zmq

from ipc import socket_errors
from ipc.connection_monitor import ConnectionMonitor
from ipc.socket_errors import EndpointInUse, Frame, PeerFull, PeerGone, check_size

Context = zmq.Context[zmq.Socket[bytes]]


class TcpSocket:
    """Its descriptor is edge-triggered: look for messages after every wake-up and after every send."""

    edge_triggered = True
    connection = None  # its monitor tells
    retry_s = None

    def __init__(self, raw: "zmq.Socket[bytes]") -> None:
        self.raw = raw

    def fileno(self) -> int:
        return int(self.raw.fileno())

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends now or raises PeerFull, PeerGone or MessageTooLarge. On a ROUTER frame 0 is the peer's identity."""
        check_size(frames)
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

    next_read = receive

    def poll(self, timeout_ms: int | None = None) -> bool:
        """Waits until `receive` has a message, or the time is over."""
        return bool(self.raw.poll(timeout_ms))

    def watch(self, on_change: Callable[[bool], None], loop: asyncio.AbstractEventLoop) -> ConnectionMonitor:
        return ConnectionMonitor(self.raw, on_change, loop)

    def close(self) -> None:
        self.raw.close(linger=0)

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


def tcp_router(context: Context, endpoint: str) -> TcpSocket:
    """Binds a ROUTER. Raises EndpointInUse."""
    raw = _socket(context, zmq.ROUTER)
    raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
    raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        raw.bind(endpoint)
    except zmq.ZMQError as error:
        raw.close(linger=0)
        raise EndpointInUse(f"cannot bind {endpoint}: {error}") from None
    return TcpSocket(raw)


def tcp_dealer(context: Context, endpoint: str, identity: bytes) -> TcpSocket:
    """Connects a DEALER, which reconnects by itself; sends fail (PeerFull) while nobody is connected."""
    raw = _socket(context, zmq.DEALER)
    raw.setsockopt(zmq.IDENTITY, identity)
    raw.setsockopt(zmq.IMMEDIATE, 1)
    raw.setsockopt(zmq.RECONNECT_IVL, 50)
    raw.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    raw.connect(endpoint)
    return TcpSocket(raw)


def _socket(context: Context, kind: int) -> "zmq.Socket[bytes]":
    raw = context.socket(kind)
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.SNDHWM, socket_errors.HIGH_WATER_MARK)
    raw.setsockopt(zmq.RCVHWM, socket_errors.HIGH_WATER_MARK)
    raw.setsockopt(zmq.MAXMSGSIZE, socket_errors.MAX_MESSAGE_BYTES)
    return raw
