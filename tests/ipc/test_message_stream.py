"""Streams of messages: any frames, cut anywhere, come out as they went in; what is no message ends the connection."""

import contextlib
import itertools
import resource
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import message_stream
from ipc.message_stream import MAX_FRAMES, Broken, MessageStream
from ipc.socket_errors import HIGH_WATER_MARK, Frame, MessageTooLarge, PeerFull

Messages = list[list[bytes]]
# bytes around the size of the buffer, too, without drawing as many
frames = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 3 * message_stream.BUFFER_BYTES).map(lambda n: (b"%d." % n * n)[:n]),
    st.integers(-12, 12).map(lambda n: b"b" * (message_stream.BUFFER_BYTES + n)),
)
messages = st.lists(st.lists(frames, min_size=1, max_size=MAX_FRAMES), min_size=1, max_size=6)


class Pair:
    """Two connected streams, each with the descriptor that tells of it."""

    def __init__(self, buffer_bytes: int | None = None) -> None:
        ends = socket.socketpair()
        self.epolls = select.epoll(), select.epoll()
        for end in ends if buffer_bytes else ():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.near, self.far = (MessageStream(end, epoll) for end, epoll in zip(ends, self.epolls, strict=True))

    def fill(self, frames: Sequence[Frame]) -> int:
        """Sends to far until its queue is full."""
        count = 0
        with contextlib.suppress(PeerFull):
            while True:
                self.near.send(frames)
                count += 1
        return count

    def close(self) -> None:
        for each in (self.near, self.far, *self.epolls):
            each.close()


@contextmanager
def pair(buffer_bytes: int | None = None) -> Iterator[Pair]:
    made = Pair(buffer_bytes)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def reader() -> Iterator[tuple[socket.socket, MessageStream]]:
    """A plain socket, and the stream that reads what is written to it."""
    raw, end = socket.socketpair()
    with raw, select.epoll() as epoll:
        stream = MessageStream(end, epoll)
        yield raw, stream
        stream.close()


def encoded(message: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(message) + 1}I", len(message), *map(len, message)) + b"".join(message)


def taken(stream: MessageStream) -> Messages:
    got = list(stream.messages)
    stream.messages.clear()
    return got


def read_to_the_end(stream: MessageStream) -> None:
    for _ in range(1000):
        try:
            stream.read()
        except Broken:
            return
    raise AssertionError("reading does not end")


@settings(deadline=None, max_examples=40)
@given(sent=messages, cuts=st.lists(st.integers(1, 70_000), min_size=1))
def test_messages_cut_anywhere_come_out_whole(sent: Messages, cuts: list[int]) -> None:
    data, got = b"".join(map(encoded, sent)), []
    sizes = itertools.cycle(cuts) if len(data) < 2000 else itertools.chain(cuts, itertools.repeat(50_000))
    with reader() as (raw, stream):
        while data:
            size = next(sizes)
            raw.sendall(data[:size])
            data = data[size:]
            stream.read()
            got += taken(stream)
        stream.read()
        assert got + taken(stream) == sent


@settings(deadline=None, max_examples=40)
@given(sent=messages, buffer_bytes=st.sampled_from([1, 5000, 30_000]))
def test_a_kernel_short_of_memory_takes_messages_in_parts(sent: Messages, buffer_bytes: int) -> None:
    with pair(buffer_bytes) as ends:
        for message in sent:
            ends.near.send(message)
        got: Messages = []
        while len(got) < len(sent):
            ends.near.flush()
            ends.far.read()
            got += taken(ends.far)
        assert got == sent
        assert ends.epolls[0].poll(0) == ends.epolls[1].poll(0) == []


@settings(deadline=None, max_examples=100)
@given(
    sent=st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=3), max_size=3),
    garbage=st.binary(max_size=300),
)
def test_garbage_only_ends_the_connection(sent: Messages, garbage: bytes) -> None:
    with reader() as (raw, stream):
        raw.sendall(b"".join(map(encoded, sent)) + garbage)
        raw.shutdown(socket.SHUT_WR)
        read_to_the_end(stream)
        assert taken(stream)[: len(sent)] == sent  # what came before it counts


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<I", 0),
        struct.pack("<I", MAX_FRAMES + 1),
        struct.pack("<II", 1, (256 << 20) + 1),
        struct.pack("<III", 2, 1, 0xFFFFFFFF),
    ],
    ids=["no frames", "many frames", "large frame", "larger frame"],
)
def test_a_head_beyond_the_bounds_ends_the_connection(head: bytes) -> None:
    with reader() as (raw, stream):
        raw.sendall(head)
        with pytest.raises(Broken):
            stream.read()


def test_a_message_announced_costs_nothing_until_it_comes() -> None:
    with reader() as (raw, stream):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        raw.sendall(struct.pack(f"<{MAX_FRAMES + 1}I", MAX_FRAMES, *[256 << 20] * MAX_FRAMES))
        stream.read()
        raw.sendall(b"x" * 1000)
        stream.read()
        assert not stream.messages
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KB


def test_messages_of_no_frames_and_of_too_many_are_refused() -> None:
    with pair() as ends:
        for number in (0, MAX_FRAMES + 1):
            with pytest.raises(MessageTooLarge, match=f"{number} frames"):
                ends.near.send([b"x"] * number)
        ends.near.send([b"x"] * MAX_FRAMES)
        ends.far.read()
        assert taken(ends.far) == [[b"x"] * MAX_FRAMES]


def test_arrays_without_elements_are_frames() -> None:
    with pair() as ends:
        ends.near.send([memoryview(np.zeros((0, 384), np.float32)), memoryview(np.zeros((2, 1), np.int16)), b""])
        ends.far.read()
        assert taken(ends.far) == [[b"", bytes(4), b""]]


@pytest.mark.parametrize("last", ["flush", "send"])
def test_the_descriptor_is_silent_when_nothing_waits(last: str) -> None:
    """Level-triggered: one that goes on asking for room would keep its process awake for ever."""
    with pair() as ends:
        count = ends.fill([b"x" * 1000])
        assert count >= HIGH_WATER_MARK
        assert ends.epolls[0].poll(0) == []  # nor while there is no room
        got = 0
        while got < count:
            ends.far.read()
            got += len(taken(ends.far))
            if last == "flush":
                ends.near.flush()
            elif got < count:
                ends.near.send([b"one more"])
                count += 1
        assert ends.epolls[0].poll(0) == []
        ends.near.send([b"x"])
        assert ends.epolls[0].poll(0) == []
        assert ends.epolls[1].poll(0) != []


def test_when_sending_fails_reading_ends_after_what_has_come() -> None:
    """The peer hears no more, but has neither closed nor stopped to speak: nobody may wait for its end."""
    with reader() as (raw, stream):
        raw.sendall(encoded([b"last words"]))
        raw.shutdown(socket.SHUT_RD)
        with pytest.raises(Broken):
            stream.send([b"x"])
        read_to_the_end(stream)
        assert taken(stream) == [[b"last words"]]


def test_the_end_comes_through_though_another_process_holds_the_descriptor() -> None:
    """As a forked child does."""
    with pair() as ends, socket.socket(fileno=socket.dup(ends.near.fileno())):
        ends.near.close()
        with pytest.raises(Broken):
            ends.far.read()
