"""Messages between processes of one host: a ROUTER that binds a Unix socket and a DEALER that connects to it.

No thread stands between the caller and the kernel, so a message costs one wake-up instead of ZeroMQ's three. The
rules are those of ipc.sockets. The first message of a connection is the DEALER's identity. What waits for a peer goes
with its connection.
"""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ipc.endpoint_lock import EndpointLock
from ipc.message_stream import Broken, MessageStream
from ipc.socket_errors import Frame, PeerFull, PeerGone, check_size

RETRY_S = 0.05  # between two attempts to connect
BACKLOG = 256  # connections waiting to be accepted
MAX_READS = 16  # of one connection before others have their turn
READABLE, BOTH = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT

Messages = deque[list[bytes]]


class LocalRouter:
    """Binds a path; frame 0 of every message is the peer's identity. Raises EndpointInUse if a live process has it."""

    edge_triggered = False
    connected = None  # a router has many connections
    retry_s = None

    def __init__(self, path: Path) -> None:
        self._lock = EndpointLock(path)
        self._path = path
        path.unlink(missing_ok=True)  # of a dead owner
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, READABLE)
        self._streams: dict[int, MessageStream] = {}  # by descriptor
        self._peers: dict[bytes, MessageStream] = {}  # by identity
        self._messages: Messages = deque()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def send(self, frames: Sequence[Frame]) -> None:
        """Raises PeerFull, PeerGone, MessageTooLarge."""
        check_size(frames)
        stream = self._peers.get(bytes(frames[0]))
        if stream is None:
            raise PeerGone("no such peer")
        try:
            stream.send(frames[1:])
        except Broken:
            while self._read(stream):  # what it said before it left
                pass
            self._drop(stream)
            raise PeerGone("the peer has left") from None
        if stream.has_unsent:
            self._epoll.modify(stream, BOTH)

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none."""
        if not self._messages:
            self._look()
        return self._messages.popleft() if self._messages else None

    def next_read(self) -> list[bytes] | None:
        """As receive, of what has been read already."""
        return self._messages.popleft() if self._messages else None

    def poll(self, timeout_ms: int | None = None) -> bool:
        """Waits until `receive` has a message, or the time is over."""
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        left: float | None = 0.0
        while not self._messages:
            self._look(left)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0 and not self._messages:
                return False
        return True

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            for stream in list(self._streams.values()):
                self._drop(stream)
            self._listener.close()
            self._epoll.close()
            self._path.unlink(missing_ok=True)
            self._lock.release()

    def _look(self, timeout_s: float | None = 0) -> None:
        for descriptor, events in self._epoll.poll(timeout_s):
            stream = self._streams.get(descriptor)
            if stream is None:
                self._accept()
                continue
            if events & select.EPOLLOUT:
                with contextlib.suppress(Broken):  # reading tells as well, after what it still has to say
                    stream.flush()
                    if not stream.has_unsent:
                        self._epoll.modify(stream, READABLE)
            if not self._read(stream):
                self._drop(stream)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                stream = MessageStream(self._listener.accept()[0])
                self._streams[stream.fileno()] = stream
                self._epoll.register(stream, READABLE)

    def _read(self, stream: MessageStream) -> bool:
        """Takes over what has come; False at the end of the connection."""
        try:
            for _ in range(MAX_READS):
                more = stream.read()
                while stream.messages:
                    self._take(stream, stream.messages.popleft())
                if not more:
                    break
        except Broken:
            return False
        return True

    def _take(self, stream: MessageStream, frames: list[bytes]) -> None:
        if stream.identity:
            self._messages.append([stream.identity, *frames])
            return
        former = self._peers.get(frames[0])
        if former is not None:
            self._drop(former)
        stream.identity = frames[0]
        self._peers[stream.identity] = stream

    def _drop(self, stream: MessageStream) -> None:
        if self._peers.get(stream.identity) is stream:
            del self._peers[stream.identity]
        if self._streams.pop(stream.fileno(), None) is not None:
            self._epoll.unregister(stream)
            stream.close()


class LocalDealer:
    """Connects to a path, again and again; sends fail (PeerFull) while nobody is there.

    Someone has to call `receive` every `retry_s` seconds while that is not None.
    """

    edge_triggered = False

    def __init__(self, path: Path, identity: bytes) -> None:
        self._path = path
        self._identity = identity
        self._epoll = select.epoll()
        self._stream: MessageStream | None = None
        self._messages: Messages = deque()
        self._retry_at = 0.0
        self._connect()

    @property
    def connected(self) -> bool:
        return self._stream is not None

    @property
    def retry_s(self) -> float | None:
        return None if self.connected else RETRY_S

    def fileno(self) -> int:
        return self._epoll.fileno()

    def send(self, frames: Sequence[Frame]) -> None:
        """Raises PeerFull, MessageTooLarge."""
        check_size(frames)
        self._connect()
        if self._stream is None:
            raise PeerFull("not connected")
        try:
            self._stream.send(frames)
        except Broken:
            while self.connected:  # what it said before it left
                self._look()
            raise PeerFull("not connected") from None
        if self._stream.has_unsent:
            self._epoll.modify(self._stream, BOTH)

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none."""
        if not self._messages:
            self._connect()
            self._look()
        return self._messages.popleft() if self._messages else None

    def next_read(self) -> list[bytes] | None:
        """As receive, of what has been read already."""
        return self._messages.popleft() if self._messages else None

    def poll(self, timeout_ms: int | None = None) -> bool:
        """Waits until `receive` has a message, or the time is over; connects meanwhile."""
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while not self._messages:
            self._connect()
            self._look()
            left = None if deadline is None else deadline - time.monotonic()
            if self._messages or (left is not None and left <= 0):
                break
            self._epoll.poll(left if self.connected else min(RETRY_S, RETRY_S if left is None else left))
        return bool(self._messages)

    def close(self) -> None:
        if not self._epoll.closed:
            self._disconnect()
            self._epoll.close()

    def _look(self) -> None:
        stream = self._stream
        if stream is None:
            return
        if stream.has_unsent:
            with contextlib.suppress(Broken):  # reading tells as well, after what it still has to say
                stream.flush()
                if not stream.has_unsent:
                    self._epoll.modify(stream, READABLE)
        try:
            while stream.read() and not stream.messages:
                pass
        except Broken:
            self._disconnect()
        self._messages.extend(stream.messages)
        stream.messages.clear()

    def _connect(self) -> None:
        now = time.monotonic()
        if self._stream is not None or now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            raw.connect(str(self._path))
            stream = MessageStream(raw)
            stream.send([self._identity])
        except (OSError, Broken):  # nobody there, or more than BACKLOG in front of us
            raw.close()
            return
        self._epoll.register(stream, READABLE)
        self._stream = stream

    def _disconnect(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._epoll.unregister(stream)
            stream.close()
