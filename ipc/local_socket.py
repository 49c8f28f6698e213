"""Messages between processes of one host: a ROUTER that binds a Unix socket and a DEALER that connects to it.

No thread stands between the caller and the kernel, so a message costs one wake-up instead of ZeroMQ's three. The
rules are those of ipc.sockets. The first message of a connection is the DEALER's identity. What waits for a peer goes
with its connection; what a peer said before its end is still heard. Nothing is sent or taken but by the calls of
the owner, who waits on `fileno` between them. A forked child must leave both alone: it shares their epoll.
"""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ipc.endpoint_lock import EndpointInUse, EndpointLock
from ipc.message_stream import READABLE, Broken, MessageStream, connect
from ipc.socket_errors import Frame, PeerFull, PeerGone, check_size

RETRY_S = 0.05  # between two attempts to connect, or to accept when there was no descriptor left
BACKLOG = 256  # connections waiting to be accepted
MAX_IDENTITY_BYTES = 255  # as ZeroMQ has it


class LocalRouter:
    """Binds a path; frame 0 of every message is the peer's identity. Raises EndpointInUse if a live process has it.

    Someone has to call `receive` every `retry_s` seconds while that is not None.
    """

    edge_triggered = False
    connection = None  # a router has many

    def __init__(self, path: Path) -> None:
        self._epoll = select.epoll()
        self._lock = EndpointLock(path)
        self._path = path
        try:
            self._listener = _listen(path)
        except OSError as error:
            self._lock.release()
            raise EndpointInUse(f"cannot bind {path}: {error}") from None
        self._epoll.register(self._listener, READABLE)
        self._accept_at = 0.0  # after a failure of ours; else 0, and the kernel tells
        self._streams: dict[int, MessageStream] = {}  # by descriptor
        self._peers: dict[bytes, MessageStream] = {}  # by identity
        self._ready: deque[MessageStream] = deque()  # with messages to be taken, one in turn of each

    @property
    def retry_s(self) -> float | None:
        return RETRY_S if self._accept_at else None

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
            self._end(stream)
            raise PeerGone("the peer has left") from None

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none."""
        self._look()
        return self.next_read()

    def next_read(self) -> list[bytes] | None:
        """As receive, of what has been read already."""
        if not self._ready:
            return None
        stream = self._ready.popleft()
        frames = stream.messages.popleft()
        if stream.messages:
            self._ready.append(stream)
        return [stream.identity, *frames]

    def poll(self, timeout_ms: int | None = None) -> bool:
        """Waits until `receive` has a message, or the time is over."""
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        left: float | None = 0.0
        while not self._ready:
            self._look(left)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0 and not self._ready:
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
        if self._accept_at:
            timeout_s = RETRY_S if timeout_s is None else min(timeout_s, RETRY_S)
            if time.monotonic() >= self._accept_at:
                self._accept_at = 0.0
                self._epoll.register(self._listener, READABLE)
        for descriptor, _ in self._epoll.poll(timeout_s):
            stream = self._streams.get(descriptor)
            if stream is not None:
                self._serve(stream)
            elif descriptor == self._listener.fileno():  # else one that we closed a moment ago
                self._accept()

    def _accept(self) -> None:
        try:
            stream = MessageStream(self._listener.accept()[0], self._epoll)
        except (BlockingIOError, ConnectionError):  # it has left again
            return
        except OSError:  # no descriptor or no memory is left, and the kernel would tell of the peer without end
            self._accept_at = time.monotonic() + RETRY_S
            self._epoll.unregister(self._listener)
            return
        self._streams[stream.fileno()] = stream
        self._serve(stream)

    def _serve(self, stream: MessageStream) -> None:
        """Sends what waits, and reads once all that was read before has been taken."""
        with contextlib.suppress(Broken):  # reading tells as well, after what it still has to say
            stream.flush()
        if not stream.messages and not self._read(stream):
            self._drop(stream)

    def _read(self, stream: MessageStream) -> bool:
        """Reads what has come; False at the end of the connection."""
        alive, was_ready = True, bool(stream.messages)
        try:
            stream.read()
        except Broken:
            alive = False
        if stream.messages and not stream.identity and not self._introduce(stream, stream.messages.popleft()):
            stream.messages.clear()
            return False
        if stream.messages and not was_ready:
            self._ready.append(stream)
        return alive

    def _introduce(self, stream: MessageStream, frames: list[bytes]) -> bool:
        """Its first message; False if that cannot be an identity. The last to come with an identity has it."""
        identity = frames[0]
        if len(frames) != 1 or not 0 < len(identity) <= MAX_IDENTITY_BYTES:
            return False
        former = self._peers.get(identity)
        if former is not None:
            self._end(former)
            if former.messages:  # they come first
                self._ready.remove(former)
                former.messages.extend(stream.messages)
                stream.messages = former.messages
        stream.identity = identity
        self._peers[identity] = stream
        return True

    def _end(self, stream: MessageStream) -> None:
        """Drops a connection after what the peer has said already."""
        stream.shut()
        while self._read(stream):
            pass
        self._drop(stream)

    def _drop(self, stream: MessageStream) -> None:
        if self._peers.get(stream.identity) is stream:
            del self._peers[stream.identity]
        if self._streams.pop(stream.fileno(), None) is not None:
            stream.close()


class LocalDealer:
    """Connects to a path, again and again; sends fail (PeerFull) while nobody is there.

    Someone has to call `receive` every `retry_s` seconds while that is not None.
    """

    edge_triggered = False

    def __init__(self, path: Path, identity: bytes) -> None:
        """Raises ValueError for an identity that no router takes."""
        if not 0 < len(identity) <= MAX_IDENTITY_BYTES:
            raise ValueError(f"an identity has 1 to {MAX_IDENTITY_BYTES} bytes, not {len(identity)}")
        self._path = path
        self._identity = identity
        self._epoll = select.epoll()
        self._stream: MessageStream | None = None
        self._num_connections = 0
        self._messages: deque[list[bytes]] = deque()
        self._retry_at = 0.0
        self._connect()

    @property
    def connection(self) -> int:
        """The number of the present connection, 0 if there is none: who saw another one before has missed an end."""
        return self._num_connections if self._stream is not None else 0

    @property
    def retry_s(self) -> float | None:
        return None if self._stream is not None else RETRY_S

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
            while self._stream is not None:  # what it said before it left
                self._look()
            raise PeerFull("not connected") from None

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none."""
        if not self._messages:
            self._connect()
            self._look()
        return self.next_read()

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
            self._epoll.poll(left if self._stream is not None else min(RETRY_S, RETRY_S if left is None else left))
        return bool(self._messages)

    def close(self) -> None:
        if not self._epoll.closed:
            self._disconnect()
            self._epoll.close()

    def _look(self) -> None:
        stream = self._stream
        if stream is None:
            return
        with contextlib.suppress(Broken):  # reading tells as well, after what it still has to say
            stream.flush()
        try:
            stream.read()
        except Broken:
            self._disconnect()
        self._messages.extend(stream.messages)
        stream.messages.clear()

    def _connect(self) -> None:
        if self._stream is not None or time.monotonic() < self._retry_at:
            return
        self._retry_at = time.monotonic() + RETRY_S
        try:
            self._stream = connect(self._path, self._epoll)
            self._stream.send([self._identity])
            self._num_connections += 1
        except Broken:
            self._disconnect()
        except OSError:  # nobody there, more than BACKLOG in front of us, or no descriptor left
            pass

    def _disconnect(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of a dead owner
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
