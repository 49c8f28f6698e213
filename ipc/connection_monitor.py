"""Tells an event loop when the connection of a DEALER comes and goes, from ZeroMQ's own monitor.

It proves that the peer's process took the connection, not that its loop turns: heartbeats do that.
"""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message


class ConnectionMonitor:
    """Calls `on_change(connected)` at every change; a connection made before counts as the first change.

    Make it before the socket's own reader, and close it before the socket: looking at a socket's state takes
    the wake-up that its reader waits for.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", on_change: Callable[[bool], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.connected = False
        self._socket = socket
        self._on_change = on_change
        self._loop = loop
        self._events = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._closed = False
        loop.add_reader(self._events.fileno(), self._drain)
        # it may have connected before the monitor began, or its event came before the reader did
        loop.call_soon(self._change, bool(socket.poll(0, zmq.POLLOUT)))
        loop.call_soon(self._drain)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._events.fileno())
            self._socket.disable_monitor()
            self._events.close(linger=0)

    def _drain(self) -> None:
        while not self._closed:
            try:
                frames = self._events.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._change(parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def _change(self, connected: bool) -> None:
        if connected != self.connected and not self._closed:
            self.connected = connected
            self._on_change(connected)
