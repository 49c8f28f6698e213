"""Unix sockets against peers that speak nonsense, halves, too much or not at all, and against a lack of descriptors."""

import array
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ipc.local_socket import BACKLOG, LocalDealer, LocalRouter
from ipc.sockets import EndpointInUse, PeerFull, PeerGone
from tests.ipc.peers import ROUTER, no_descriptors, receive, sent, until
from tests.ipc.processes import Child, num_fds


@pytest.fixture
def path(local_endpoint: str) -> Path:
    return Path(local_endpoint.removeprefix("ipc://"))


@pytest.fixture
def router(path: Path) -> Iterator[LocalRouter]:
    made = LocalRouter(path)
    yield made
    made.close()


@contextmanager
def dealer(path: Path, identity: bytes = b"me") -> Iterator[LocalDealer]:
    made = LocalDealer(path, identity)
    yield made
    made.close()


@contextmanager
def stranger(path: Path, data: bytes = b"") -> Iterator[socket.socket]:
    """Someone who connects and says `data`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.connect(str(path))
        raw.sendall(data)
        yield raw


def message(*frames: bytes) -> bytes:
    return struct.pack(f"<{len(frames) + 1}I", len(frames), *map(len, frames)) + b"".join(frames)


def all_of(router: LocalRouter) -> list[list[bytes]]:
    got = []
    while router.poll(20):
        got.append(receive(router))
    return got


def is_silent(waited: LocalRouter | LocalDealer) -> bool:
    return not select.select([waited], [], [], 0.02)[0]


# --- peers ------------------------------------------------------------------------------------------------

NONSENSE = {
    "noise": b"GET / HTTP/1.1\r\n\r\n",
    "no identity": message(b""),
    "a long identity": message(b"i" * 256),
    "two identities": message(b"me", b"you"),
    "noise after its identity": message(b"stranger") + b"\xff" * 100,
    "a huge frame": message(b"stranger") + struct.pack("<II", 1, 0xFFFFFFF0),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_hung_up_on_and_hurts_nobody(router: LocalRouter, path: Path, data: bytes) -> None:
    with dealer(path) as client, stranger(path, data) as other:
        client.send([b"hello"])
        assert all_of(router) == [[b"me", b"hello"]]
        other.settimeout(5)
        assert _hangs_up(other)
        router.send([b"me", b"hello"])
        assert receive(client) == [b"hello"]
    assert all_of(router) == []
    assert is_silent(router)


def _hangs_up(raw: socket.socket) -> bool:
    try:
        return raw.recv(1) == b""
    except ConnectionResetError:
        return True


def test_what_was_said_before_nonsense_is_heard(router: LocalRouter, path: Path) -> None:
    with stranger(path, message(b"odd") + message(b"sense") + b"\xff" * 100):
        assert all_of(router) == [[b"odd", b"sense"]]
    with pytest.raises(PeerGone):
        router.send([b"odd", b"?"])


def test_half_a_message_is_none(router: LocalRouter, path: Path) -> None:
    before = num_fds()
    for data in (message(b"odd")[:5], message(b"odd") + message(b"x" * 100)[:50], message(b"odd") + b"\1"):
        with stranger(path, data):
            assert all_of(router) == []
            assert is_silent(router)  # while it is not continued, too
        assert all_of(router) == []
    assert num_fds() == before
    assert is_silent(router)


def test_a_peer_that_hears_no_more_is_gone_after_what_it_said(router: LocalRouter, path: Path) -> None:
    with stranger(path, message(b"odd")) as other:
        assert not router.poll(20)
        other.sendall(message(b"1") + message(b"2"))
        other.shutdown(socket.SHUT_RD)
        with pytest.raises(PeerGone):
            router.send([b"odd", b"?"])
        assert all_of(router) == [[b"odd", b"1"], [b"odd", b"2"]]


def test_a_router_that_hears_no_more_does_not_hang_its_dealer(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with dealer(path) as client, listener.accept()[0] as server:
            server.sendall(message(b"last words"))
            server.shutdown(socket.SHUT_RD)
            with pytest.raises(PeerFull):
                client.send([b"?"])
            assert client.receive() == [b"last words"]


def test_descriptors_sent_along_are_closed(router: LocalRouter, path: Path) -> None:
    with stranger(path, message(b"odd")) as other:
        assert not router.poll(20)
        before = num_fds()
        for _ in range(3):
            other.sendmsg([message(b"x")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))])
        assert all_of(router) == [[b"odd", b"x"]] * 3
        assert num_fds() == before


def test_who_talks_without_end_does_not_keep_others_from_being_heard(router: LocalRouter, path: Path) -> None:
    with dealer(path, b"loud") as loud, dealer(path, b"soft") as soft:
        fill_once(loud, b"x")
        assert receive(router) == [b"loud", b"x"]
        soft.send([b"hello"])
        for _ in range(100):
            heard = [receive(router)[0] for _ in range(4)]
            assert b"soft" in heard
            soft.send([b"hello"])
            fill_once(loud, b"x")


def fill_once(client: LocalDealer, frame: bytes) -> None:
    while sent(client, [frame]):
        pass


def test_the_last_with_an_identity_has_it_and_its_former_words_come_first(router: LocalRouter, path: Path) -> None:
    with dealer(path) as first:
        first.send([b"0"])
        assert receive(router) == [b"me", b"0"]
        for number in range(1, 51):
            first.send([b"%d" % number * 500])
        assert receive(router)[1] == b"1" * 500  # and many are read
        with dealer(path) as second:
            second.send([b"last"])
            words = [frames[1] for frames in all_of(router)]
            assert words == [b"%d" % number * 500 for number in range(2, 51)] + [b"last"]
            router.send([b"me", b"you"])
            assert receive(second) == [b"you"]
            assert first.receive() is None
            assert second.connection == 1


def test_descriptors_used_again_within_one_look(router: LocalRouter, path: Path) -> None:
    """Events of a connection that is dropped meanwhile belong to nobody, nor to the next with its descriptor."""
    for turn in range(4):
        with dealer(path, b"a") as first, dealer(path, b"b") as other:
            first.send([b"1"])
            other.send([b"1"])
            assert sorted(all_of(router)) == [[b"a", b"1"], [b"b", b"1"]]
            other.send([b"2"])
            first.send([b"2"])
            with dealer(path, b"a") as second, dealer(path, b"c") as third:  # a's first connection is dropped
                second.send([b"3"])
                third.send([b"3"])
                other.send([b"3"])
                expected = [[b"a", b"2"], [b"a", b"3"], [b"b", b"2"], [b"b", b"3"], [b"c", b"3"]]
                assert sorted(all_of(router)) == expected, turn
                router.send([b"c", b"yours"])
                assert receive(third) == [b"yours"]


def test_many_peers_each_get_their_own(router: LocalRouter, path: Path) -> None:
    before = num_fds()
    number = BACKLOG + 50
    clients = {b"%d" % index: LocalDealer(path, b"%d" % index) for index in range(number)}
    waiting = set(clients)
    while waiting:  # more than may wait to be accepted: the rest tries again
        waiting -= {identity for identity in waiting if sent(clients[identity], [b"hello"])}
        while (frames := router.receive()) is not None:
            router.send([frames[0], frames[0] + b", too"])
    for identity, client in clients.items():
        until(lambda: all(sent(router, frames) for frames in iter_echo(router)))
        assert receive(client) == [identity + b", too"]
        client.close()
    assert all_of(router) == []
    assert num_fds() == before


def iter_echo(router: LocalRouter) -> Iterator[list[bytes]]:
    while (frames := router.receive()) is not None:
        yield [frames[0], frames[0] + b", too"]


@pytest.mark.parametrize("num_bytes", [1, 65_536, 1_000_003, 32 << 20])
def test_messages_of_every_size_there_and_back(path: Path, num_bytes: int) -> None:
    data = os.urandom(1000) * (num_bytes // 1000) + os.urandom(num_bytes % 1000)
    with Child(ROUTER, f"ipc://{path}") as server:
        assert server.line() == "bound"
        with dealer(path) as client:
            until(lambda: sent(client, [data, b"end"]))
            server.order("echo")
            server.order("count")  # what waits is sent while it looks for more
            assert until_sent(client) == [data, b"end"]
            assert server.line() == "0 "


def until_sent(client: LocalDealer) -> list[bytes]:
    """The next message, which may need a while; what waits here is sent meanwhile."""
    assert client.poll(20_000)
    return receive(client)


# --- descriptors, files, locks ----------------------------------------------------------------------------


def test_a_router_without_descriptors_waits_and_does_not_spin(router: LocalRouter, path: Path) -> None:
    with dealer(path) as early:
        early.send([b"1"])
        assert receive(router) == [b"me", b"1"]
        with dealer(path, b"late") as late:
            late.send([b"2"])
            with no_descriptors():
                assert router.receive() is None
                assert router.retry_s is not None
                assert is_silent(router)
                early.send([b"3"])  # who is there is served
                assert receive(router) == [b"me", b"3"]
                began, cpu = time.monotonic(), time.process_time()
                assert not router.poll(300)
                assert time.monotonic() - began >= 0.3
                assert time.process_time() - cpu < 0.1
            assert receive(router) == [b"late", b"2"]
            assert router.retry_s is None


def test_a_dealer_without_descriptors_is_not_connected(router: LocalRouter, path: Path) -> None:
    router.close()
    with dealer(path) as client:
        router = LocalRouter(path)
        time.sleep(0.06)
        with no_descriptors(), pytest.raises(PeerFull):
            client.send([b"hello"])
        until(lambda: sent(client, [b"hello"]))
        assert receive(router) == [b"me", b"hello"]
        router.close()


def test_a_path_that_cannot_be_bound_is_left_alone(path: Path) -> None:
    before = num_fds()
    for _ in range(2):  # the second time it is not said to be in use
        with pytest.raises(EndpointInUse, match=r"cannot bind .*too long"):
            LocalRouter(path.with_name("x" * 120))
    assert num_fds() == before
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("identity", [b"", b"i" * 256])
def test_an_identity_that_no_router_takes_is_refused(path: Path, identity: bytes) -> None:
    with pytest.raises(ValueError, match=f"not {len(identity)}"):
        LocalDealer(path, identity)


def test_a_restart_between_two_sends_gives_another_connection(path: Path) -> None:
    router = LocalRouter(path)
    with dealer(path) as client:
        client.send([b"1"])
        assert client.connection == 1
        time.sleep(0.06)
        router.close()
        router = LocalRouter(path)
        with pytest.raises(PeerFull):
            client.send([b"2"])
        client.send([b"3"])
        assert client.connection == 2
        assert receive(router) == [b"me", b"3"]
    router.close()


def test_a_socket_that_was_full_is_silent_again(path: Path) -> None:
    with Child(ROUTER, f"ipc://{path}") as server:
        assert server.line() == "bound"
        with dealer(path) as client:
            until(lambda: sent(client, [b"x" * 1000]))
            server.order("count")
            count = 1
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:  # sends make room for each other: nobody looks
                count += sent(client, [b"x" * 1000])
            until(lambda: client.receive() is None and is_silent(client))
            assert server.line().split()[0] == str(count)
