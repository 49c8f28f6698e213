"""Programs at the other end of a socket, and small verbs for this end."""

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ipc.sockets import EventSocket, Frame, PeerFull, PeerGone, Socket

# binds a ROUTER and does as told: echo one message, or count what has come when no more comes
ROUTER = """
    import sys, zmq
    from ipc.sockets import EndpointInUse, router
    try:
        socket = router(zmq.Context(), sys.argv[1])
    except EndpointInUse:
        print("in use", flush=True)
        sys.exit()
    print("bound", flush=True)
    for order in sys.stdin:
        if order.strip() == "echo":
            socket.poll(5000)
            socket.send(socket.receive())
        else:
            count = 0
            while socket.poll(500):
                while (frames := socket.receive()) is not None:
                    count += 1
                    last = frames[-1][:16]
            print(count, last.decode() if count else "", flush=True)
"""
# connects a DEALER, says hello, then counts what has come when told to
DEALER = """
    import sys, time, zmq
    from ipc.sockets import PeerFull, dealer
    socket = dealer(zmq.Context(), sys.argv[1], b"child")
    while True:
        try:
            socket.send([b"hello"])
            break
        except PeerFull:
            time.sleep(0.01)
    for order in sys.stdin:
        count = 0
        while socket.poll(500):
            while socket.receive() is not None:
                count += 1
        print(count, flush=True)
"""


def free_tcp_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def sent(socket: Socket | EventSocket, frames: list[Frame]) -> bool:
    try:
        socket.send(frames)
    except (PeerFull, PeerGone):
        return False
    return True


def receive(socket: Socket) -> list[bytes]:
    assert socket.poll(10_000), "nothing came"
    frames = socket.receive()
    assert frames is not None
    return frames


def fill(socket: Socket | EventSocket, frames: list[Frame]) -> int:
    """Sends until nothing but PeerFull has come of it for a while; the number of messages that went."""
    count, deadline = 0, time.monotonic() + 0.3
    while time.monotonic() < deadline:
        try:
            socket.send(frames)
        except PeerFull:
            continue
        count, deadline = count + 1, time.monotonic() + 0.3
    return count


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    full = []
    try:
        while True:
            full.append(os.dup(0))
    except OSError:
        pass
    try:
        yield
    finally:
        for descriptor in full:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
