"""Hello, Join and the ring's descriptor over the Unix socket; peers that are silent, broken, hostile or dead."""

import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc import membership
from ipc.codec import encode
from ipc.control import Hello, Join
from ipc.endpoint_lock import EndpointInUse
from ipc.membership import MAX_FRAME_BYTES, STALL_SECONDS, MembershipClosed, MembershipListener, MembershipSocket
from ipc.step import Shutdown
from ipc.step_ring import ArrayField, RingLayout, StepRing
from tests.ipc.processes import Child, num_fds

LAYOUT = RingLayout(num_slots=2, inputs=(ArrayField("a", "int32", (4,)),), outputs=())
HELLO = Hello(incarnation=5, role="rank", index=0, pid=1)
JOIN = Join(epoch=7, scheduler=1, rank=0, members=[5], rendezvous="", layout=LAYOUT)

RANK = """
    import sys
    from pathlib import Path
    from ipc.control import Hello
    from ipc.membership import MembershipSocket
    from ipc.step_ring import StepRing
    peer = MembershipSocket.connect(Path(sys.argv[1]))
    peer.send(Hello(5, "rank", 0, 1))
    join, fd = peer.receive()
    ring = StepRing.attach(fd, join.layout)
    print(peer.peer_pid, join.epoch, *ring.slot(1)["a"], flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder) / "join.sock"


@pytest.fixture
def pair() -> Iterator[tuple[MembershipSocket, socket.socket]]:
    """Our end, and the raw other end, which can send anything. No descriptor is left over."""
    before = num_fds()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield MembershipSocket(ours), theirs
    ours.close()
    theirs.close()
    assert num_fds() == before


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def accept(listener: MembershipListener) -> MembershipSocket:
    assert select.select([listener], [], [], 10)[0]
    peer = listener.accept()
    assert peer is not None
    return peer


def test_a_rank_says_hello_and_gets_the_ring(path: Path) -> None:
    before = num_fds()
    listener, ring = MembershipListener(path), StepRing.create(LAYOUT)
    ring.slot(1)["a"][:] = (1, 2, 3, 4)
    assert listener.accept() is None
    with Child(RANK, path) as child:
        peer = accept(listener)
        assert peer.peer_pid == child.pid
        hello, nothing = peer.receive()
        assert (hello, nothing) == (Hello(5, "rank", 0, 1), None)
        peer.send(JOIN, ring.fd)
        assert child.line() == f"{os.getpid()} 7 1 2 3 4"
        pidfd = peer.pidfd()
        assert select.select([pidfd], [], [], 0)[0] == []
        child.kill()
        assert select.select([pidfd], [], [], 10)[0] == [pidfd]
        with pytest.raises(MembershipClosed, match="closed the connection"):
            peer.receive()
        with pytest.raises(ConnectionError):
            peer.send(JOIN, ring.fd)
        os.close(pidfd)
        peer.close()
    ring.close()
    listener.close()
    assert list(path.parent.iterdir()) == []
    assert num_fds() == before


def test_a_listener_in_use_is_refused_and_a_killed_one_blocks_nobody(path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from ipc.membership import MembershipListener
        listener = MembershipListener(Path(sys.argv[1]))
        print("listening", flush=True)
        sys.stdin.readline()
    """
    with Child(code, path) as owner:
        assert owner.line() == "listening"
        before = num_fds()
        with pytest.raises(EndpointInUse):
            MembershipListener(path)
        assert num_fds() == before
        MembershipSocket.connect(path).close()  # still the owner's
        owner.kill()
    with pytest.raises(ConnectionRefusedError):
        MembershipSocket.connect(path)
    listener = MembershipListener(path)
    MembershipSocket.connect(path).close()
    accept(listener).close()
    listener.close()
    with pytest.raises(FileNotFoundError):
        MembershipSocket.connect(path)


def test_received_descriptors_are_not_inherited(pair: tuple[MembershipSocket, socket.socket]) -> None:
    ours, theirs = pair
    MembershipSocket(theirs).send(JOIN, 0)
    message, fd = ours.receive()
    assert message == JOIN
    assert fd is not None
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_silent_peer_times_out_and_can_still_speak(pair: tuple[MembershipSocket, socket.socket]) -> None:
    ours, theirs = pair
    ours.connection.settimeout(0.05)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            ours.receive()
    ours.connection.setblocking(False)
    with pytest.raises(TimeoutError):
        ours.receive()
    theirs.sendall(frame(encode(HELLO)))
    assert ours.receive() == (HELLO, None)
    assert ours.connection.gettimeout() == 0


def test_a_silent_peer_does_not_keep_others_waiting(path: Path) -> None:
    listener = MembershipListener(path)
    silent, speaking = MembershipSocket.connect(path), MembershipSocket.connect(path)
    speaking.send(HELLO)
    first, second = accept(listener), accept(listener)
    assert select.select([first, second], [], [], 10)[0] == [second]
    assert second.receive() == (HELLO, None)
    for peer in (silent, speaking, first, second):
        peer.close()
    listener.close()


@pytest.mark.parametrize("count", [1, 3, 4, 20])
def test_a_frame_that_stalls_ends_the_connection_soon(
    pair: tuple[MembershipSocket, socket.socket], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "STALL_SECONDS", 0.1)
    ours, theirs = pair
    socket.send_fds(theirs, [frame(encode(HELLO))[:count]], [0])
    began = time.monotonic()
    with pytest.raises(MembershipClosed, match="before the end of a frame"):
        ours.receive()
    assert time.monotonic() - began < 1


def test_a_frame_that_trickles_in_is_not_waited_for_longer(pair: tuple[MembershipSocket, socket.socket]) -> None:
    ours, theirs = pair
    stop = threading.Event()

    def trickle() -> None:
        for byte in frame(b"x" * 1000):
            if stop.wait(0.05):
                return
            theirs.sendall(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(MembershipClosed):
        ours.receive()
    assert time.monotonic() - began < STALL_SECONDS + 1
    stop.set()
    thread.join()


def test_a_frame_in_pieces_is_whole(pair: tuple[MembershipSocket, socket.socket]) -> None:
    ours, theirs = pair
    data = frame(encode(JOIN))

    def in_pieces() -> None:
        socket.send_fds(theirs, [data[:2]], [0])
        for start in range(2, len(data), 40):
            time.sleep(0.002)
            theirs.sendall(data[start : start + 40])

    thread = threading.Thread(target=in_pieces)
    thread.start()
    message, fd = ours.receive()
    thread.join()
    assert message == JOIN
    assert fd is not None
    os.close(fd)


@pytest.mark.parametrize(
    "data",
    [
        frame(b""),
        frame(b"\xc1"),
        frame(encode(Shutdown(1, "another link's message"))),
        frame(b"\x91" * 100_000),
        struct.pack("!I", MAX_FRAME_BYTES + 1),
        b"\xff" * 64,
    ],
    ids=["empty", "not msgpack", "another link's", "too deep", "too long", "noise"],
)
def test_what_is_no_message_ends_the_connection_and_closes_its_descriptor(
    pair: tuple[MembershipSocket, socket.socket], data: bytes
) -> None:
    ours, theirs = pair
    before = num_fds()
    sender = threading.Thread(target=socket.send_fds, args=(theirs, [data], [0]))
    sender.start()
    with pytest.raises(MembershipClosed):
        ours.receive()
    assert num_fds() == before
    ours.close()  # what was not read is of no interest, and lets the sender go
    sender.join()
    pair[1].close()


def test_more_descriptors_than_one_are_closed(pair: tuple[MembershipSocket, socket.socket]) -> None:
    ours, theirs = pair
    before = num_fds()
    socket.send_fds(theirs, [frame(encode(JOIN))], [0, 0, 0])
    with pytest.raises(MembershipClosed, match="more than one"):
        ours.receive()
    assert num_fds() == before


def test_a_descriptor_in_the_middle_of_a_frame_is_not_kept(pair: tuple[MembershipSocket, socket.socket]) -> None:
    ours, theirs = pair
    before = num_fds()
    data = frame(encode(JOIN))
    theirs.sendall(data[:6])
    socket.send_fds(theirs, [data[6:]], [0])
    assert ours.receive() == (JOIN, None)
    assert num_fds() == before


def test_the_end_of_the_peer_within_a_frame_is_told(pair: tuple[MembershipSocket, socket.socket]) -> None:
    ours, theirs = pair
    socket.send_fds(theirs, [frame(encode(JOIN))[:10]], [0])
    theirs.shutdown(socket.SHUT_WR)
    before = num_fds()
    with pytest.raises(MembershipClosed, match="within a frame"):
        ours.receive()
    assert num_fds() == before
