"""Messages between processes of one host: a ROUTER that binds a Unix socket and a DEALER that connects to it.

No thread stands between the caller and the kernel, so a message costs one wake-up instead of ZeroMQ's three. The
rules are those of ipc.sockets. A message on the stream is `<I number of frames, <I bytes of each frame, the frames`;
the first one of a connection is the DEALER's identity. What waits for a peer goes with its connection.
"""

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ipc import socket_errors
from ipc.endpoint_lock import EndpointLock
from ipc.socket_errors import HIGH_WATER_MARK, Frame, PeerFull, PeerGone, check_size

RETRY_S = 0.05  # between two attempts to connect
BUFFER_BYTES = 64 << 10
MAX_FRAMES = 64
BACKLOG = 256  # connections waiting to be accepted
MAX_READS = 16  # of one connection before others have their turn
READABLE, BOTH = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT

Messages = deque[list[bytes]]


class _Broken(Exception):
    """The connection is at its end, or speaks another protocol."""


class _Stream:
    """One connection: whole messages in and out, neither call waits."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self.identity = b""
        self.messages: Messages = deque()
        self._raw = raw
        self._unsent: deque[memoryview] = deque()  # one a message
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._num_buffered = 0
        self._large: memoryview | None = None  # a message that does not fit the buffer
        self._num_large = 0

    def fileno(self) -> int:
        return self._raw.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, frames: Sequence[Frame]) -> None:
        """Raises PeerFull, _Broken."""
        self.flush()
        if len(self._unsent) >= HIGH_WATER_MARK:
            raise PeerFull("peer's queue is full")
        views = [memoryview(frame).cast("B") if isinstance(frame, memoryview) else frame for frame in frames]
        parts = [struct.pack(f"<{len(views) + 1}I", len(views), *map(len, views)), *views]
        num_sent = 0
        if not self._unsent:
            try:
                num_sent = self._raw.sendmsg(parts)
            except BlockingIOError:
                pass
            except OSError as error:
                raise _Broken from error
        if num_sent < sum(map(len, parts)):
            self._unsent.append(memoryview(b"".join(parts))[num_sent:])

    def flush(self) -> None:
        """Sends what waits, as far as the peer takes it. Raises _Broken."""
        while self._unsent:
            try:
                num_sent = self._raw.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise _Broken from error
            self._unsent[0] = self._unsent[0][num_sent:]
            if not self._unsent[0]:
                self._unsent.popleft()

    def read(self) -> bool:
        """Reads once; tells whether anything came. Raises _Broken at the end."""
        room = self._buffer[self._num_buffered :] if self._large is None else self._large[self._num_large :]
        try:
            count = self._raw.recv_into(room)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _Broken from error
        if count == 0:
            raise _Broken
        if self._large is None:
            self._num_buffered += count
            self._take_buffered()
        else:
            self._num_large += count
            if self._num_large == len(self._large):
                self.messages.append(_split(self._large))
                self._large = None
        return True

    def close(self) -> None:
        self._raw.close()

    def _take_buffered(self) -> None:
        """Moves whole messages out of the buffer, and one too large for it into memory of its own."""
        begin = 0
        while num_bytes := _message_bytes(self._buffer[begin : self._num_buffered]):
            end = begin + num_bytes
            if end > self._num_buffered:
                break
            self.messages.append(_split(self._buffer[begin:end]))
            begin = end
        rest = self._num_buffered - begin
        if num_bytes > BUFFER_BYTES:
            self._large = memoryview(bytearray(num_bytes))
            self._large[:rest] = self._buffer[begin : self._num_buffered]
            self._num_large, rest = rest, 0
        elif begin:
            self._buffer[:rest] = bytes(self._buffer[begin : self._num_buffered])
        self._num_buffered = rest


class LocalRouter:
    """Binds a path; frame 0 of every message is the peer's identity. Raises EndpointInUse if a live process has it."""

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
        self._streams: dict[int, _Stream] = {}  # by descriptor
        self._peers: dict[bytes, _Stream] = {}  # by identity
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
        except _Broken:
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
        for descriptor, _ in self._epoll.poll(timeout_s):
            stream = self._streams.get(descriptor)
            if stream is None:
                self._accept()
                continue
            try:
                stream.flush()
                if not stream.has_unsent:
                    self._epoll.modify(stream, READABLE)
            except _Broken:
                pass  # reading tells as well, after what it still has to say
            if not self._read(stream):
                self._drop(stream)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                stream = _Stream(self._listener.accept()[0])
                self._streams[stream.fileno()] = stream
                self._epoll.register(stream, READABLE)

    def _read(self, stream: _Stream) -> bool:
        """Takes over what has come; False at the end of the connection."""
        try:
            for _ in range(MAX_READS):
                more = stream.read()
                while stream.messages:
                    self._take(stream, stream.messages.popleft())
                if not more:
                    break
        except _Broken:
            return False
        return True

    def _take(self, stream: _Stream, frames: list[bytes]) -> None:
        if stream.identity:
            self._messages.append([stream.identity, *frames])
            return
        former = self._peers.get(frames[0])
        if former is not None:
            self._drop(former)
        stream.identity = frames[0]
        self._peers[stream.identity] = stream

    def _drop(self, stream: _Stream) -> None:
        if self._peers.get(stream.identity) is stream:
            del self._peers[stream.identity]
        if self._streams.pop(stream.fileno(), None) is not None:
            self._epoll.unregister(stream)
            stream.close()


class LocalDealer:
    """Connects to a path, again and again; sends fail (PeerFull) while nobody is there.

    Someone has to call `receive` every `retry_s` seconds while that is not None.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self._path = path
        self._identity = identity
        self._epoll = select.epoll()
        self._stream: _Stream | None = None
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
        except _Broken:
            self._look()
            self._disconnect()
            raise PeerFull("not connected") from None
        if self._stream.has_unsent:
            self._epoll.modify(self._stream, BOTH)

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none."""
        if not self._messages:
            self._connect()
            self._look()
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
        try:
            if stream.has_unsent:
                stream.flush()
                if not stream.has_unsent:
                    self._epoll.modify(stream, READABLE)
        except _Broken:
            pass  # reading tells as well, after what it still has to say
        try:
            while stream.read() and not stream.messages:
                pass
        except _Broken:
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
            stream = _Stream(raw)
            stream.send([self._identity])
        except (OSError, _Broken):  # nobody there, or more than BACKLOG in front of us
            raw.close()
            return
        self._epoll.register(stream, READABLE)
        self._stream = stream

    def _disconnect(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._epoll.unregister(stream)
            stream.close()


def _message_bytes(data: memoryview) -> int:
    """How many bytes the message that begins here has; 0 where that is not to be seen yet. Raises _Broken."""
    if len(data) < 4:
        return 0
    num_frames: int = struct.unpack_from("<I", data)[0]
    if not 0 < num_frames <= MAX_FRAMES:
        raise _Broken
    head = 4 * (num_frames + 1)
    if len(data) < head:
        return 0
    lengths: tuple[int, ...] = struct.unpack_from(f"<{num_frames}I", data, 4)
    if max(lengths) > socket_errors.MAX_MESSAGE_BYTES:
        raise _Broken
    return head + sum(lengths)


def _split(message: memoryview) -> list[bytes]:
    num_frames: int = struct.unpack_from("<I", message)[0]
    lengths = struct.unpack_from(f"<{num_frames}I", message, 4)
    at = 4 * (num_frames + 1)
    frames = []
    for length in lengths:
        frames.append(bytes(message[at : at + length]))
        at += length
    return frames
