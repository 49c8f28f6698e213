"""Whole messages over one connected Unix socket, in and out; no call waits.

On the stream a message is `<I number of frames, <I bytes of each frame, the frames`. Knows nothing of who is at the
other end.
"""

import contextlib
import mmap
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ipc import socket_errors
from ipc.socket_errors import HIGH_WATER_MARK, Frame, MessageTooLarge, PeerFull

BUFFER_BYTES = 64 << 10
MAX_FRAMES = 8
READABLE, BOTH = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


class Broken(Exception):
    """The connection is at its end, or speaks another protocol."""


class MessageStream:
    """One connection. `epoll` tells of what comes, and of room for as long as something waits for it."""

    def __init__(self, raw: socket.socket, epoll: select.epoll) -> None:
        """Takes `raw` over. Raises OSError if the kernel cannot watch it."""
        raw.setblocking(False)
        self.identity = b""
        self.messages: deque[list[bytes]] = deque()  # read, and not taken yet
        self._raw = raw
        self._epoll = epoll
        self._unsent: deque[memoryview] = deque()  # one a message
        self._awaits_room = False
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._num_buffered = 0
        self._large: memoryview | None = None  # a message that does not fit the buffer
        self._num_large = 0
        try:
            epoll.register(raw, READABLE)
        except OSError:
            raw.close()
            raise

    def fileno(self) -> int:
        return self._raw.fileno()

    def send(self, frames: Sequence[Frame]) -> None:
        """Raises PeerFull, MessageTooLarge, Broken."""
        if not 0 < len(frames) <= MAX_FRAMES:
            raise MessageTooLarge(f"a message of {len(frames)} frames, it can have 1 to {MAX_FRAMES}")
        self.flush()
        if len(self._unsent) >= HIGH_WATER_MARK:
            raise PeerFull("peer's queue is full")
        views = [_bytes_of(frame) for frame in frames]
        parts = [struct.pack(f"<{len(views) + 1}I", len(views), *map(len, views)), *views]
        num_sent = 0
        if not self._unsent:
            try:
                num_sent = self._raw.sendmsg(parts)
            except BlockingIOError:
                pass
            except OSError as error:
                self.shut()
                raise Broken from error
        if num_sent < sum(map(len, parts)):
            self._unsent.append(memoryview(b"".join(parts))[num_sent:])
            self._await_room()

    def flush(self) -> None:
        """Sends what waits, as far as the peer takes it. Raises Broken."""
        while self._unsent:
            try:
                num_sent = self._raw.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                self.shut()
                raise Broken from error
            self._unsent[0] = self._unsent[0][num_sent:]
            if not self._unsent[0]:
                self._unsent.popleft()
        self._await_room()

    def read(self) -> None:
        """Reads until there are messages, or until nothing more has come. Raises Broken at the end."""
        while self._read_once() and not self.messages:
            pass

    def shut(self) -> None:
        """Sends no more, and lets nothing more come: reading takes what has come already, then finds the end."""
        with contextlib.suppress(OSError):  # the peer may have been faster
            self._raw.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._raw.fileno() >= 0:
            self._epoll.unregister(self._raw)
            self.shut()  # a forked child may hold the descriptor too; the peer has to learn of it all the same
            self._raw.close()

    def _await_room(self) -> None:
        """Asked for any longer than something waits, it would never be silent."""
        if self._awaits_room != bool(self._unsent):
            self._awaits_room = bool(self._unsent)
            self._epoll.modify(self._raw, BOTH if self._unsent else READABLE)

    def _read_once(self) -> bool:
        """Tells whether there may be more."""
        room = self._buffer[self._num_buffered :] if self._large is None else self._large[self._num_large :]
        try:
            count = self._raw.recv_into(room)
        except BlockingIOError:
            return False
        except OSError as error:
            raise Broken from error
        if count == 0:
            raise Broken
        if self._large is None:
            self._num_buffered += count
            self._take_buffered()
        else:
            self._num_large += count
            if self._num_large == len(self._large):
                self.messages.append(_split(self._large))
                self._large = None
        return count == len(room)

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
            self._large = _lazy_memory(num_bytes)
            self._large[:rest] = self._buffer[begin : self._num_buffered]
            self._num_large, rest = rest, 0
        elif begin:
            self._buffer[:rest] = bytes(self._buffer[begin : self._num_buffered])
        self._num_buffered = rest


def connect(path: Path, epoll: select.epoll) -> MessageStream:
    """Raises OSError if nobody listens there, or too many are waiting."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        raw.connect(str(path))
    except OSError:
        raw.close()
        raise
    return MessageStream(raw, epoll)


def _lazy_memory(num_bytes: int) -> memoryview:
    """Costs only what is written to it: a message announced may never come. Raises Broken if there is none."""
    try:
        return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise Broken from error


def _bytes_of(frame: Frame) -> Frame:
    """The frame with its length in bytes; an array without elements cannot be cast."""
    if not isinstance(frame, memoryview):
        return frame
    return frame.cast("B") if frame.nbytes else b""


def _message_bytes(data: memoryview) -> int:
    """How many bytes the message that begins here has; 0 where that is not to be seen yet. Raises Broken."""
    if len(data) < 4:
        return 0
    num_frames: int = struct.unpack_from("<I", data)[0]
    if not 0 < num_frames <= MAX_FRAMES:
        raise Broken
    head = 4 * (num_frames + 1)
    if len(data) < head:
        return 0
    lengths: tuple[int, ...] = struct.unpack_from(f"<{num_frames}I", data, 4)
    if max(lengths) > socket_errors.MAX_MESSAGE_BYTES:
        raise Broken
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
