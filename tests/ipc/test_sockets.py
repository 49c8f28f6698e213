"""The sockets between processes: nothing stolen, nothing dropped in silence, nothing delivered to the wrong process."""

import os
from pathlib import Path

import numpy as np
import pytest
import zmq

from ipc import socket_errors
from ipc.sockets import Context, EndpointInUse, MessageTooLarge, PeerFull, PeerGone, dealer, router
from ipc.tcp_socket import TcpSocket
from tests.ipc.peers import DEALER, ROUTER, fill, free_tcp_endpoint, receive, sent, until
from tests.ipc.processes import Child, num_fds

# --- endpoints --------------------------------------------------------------------------------------------


def test_a_bound_endpoint_is_refused_and_not_stolen(context: Context, local_endpoint: str) -> None:
    with Child(ROUTER, local_endpoint) as owner:
        assert owner.line() == "bound"
        with pytest.raises(EndpointInUse, match="live process"):
            router(context, local_endpoint)
        with Child(ROUTER, local_endpoint) as other:
            assert other.line() == "in use"
        client = dealer(context, local_endpoint, b"me")
        until(lambda: sent(client, [b"still there?"]))
        owner.order("echo")
        assert receive(client) == [b"still there?"]
        client.close()


def test_an_endpoint_is_refused_within_one_process_too(context: Context, local_endpoint: str) -> None:
    first = router(context, local_endpoint)
    with pytest.raises(EndpointInUse):
        router(context, local_endpoint)
    first.close()
    router(context, local_endpoint).close()


def test_a_killed_owner_blocks_nobody(context: Context, local_endpoint: str) -> None:
    path = Path(local_endpoint.removeprefix("ipc://"))
    for _ in range(2):
        with Child(ROUTER, local_endpoint) as owner:
            assert owner.line() == "bound"
            owner.kill()
        assert path.exists()
    server, client = router(context, local_endpoint), dealer(context, local_endpoint, b"me")
    until(lambda: sent(client, [b"hello"]))
    assert receive(server) == [b"me", b"hello"]
    client.close()
    server.close()
    assert list(path.parent.iterdir()) == []


def test_a_tcp_endpoint_in_use_is_refused(context: Context) -> None:
    server = router(context, "tcp://127.0.0.1:*")
    assert isinstance(server, TcpSocket)
    address = server.raw.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(EndpointInUse, match="cannot bind"):
        router(context, address)
    server.close()


def test_the_folder_of_a_socket_is_private(context: Context, local_endpoint: str) -> None:
    server = router(context, local_endpoint)
    assert os.stat(Path(local_endpoint.removeprefix("ipc://")).parent).st_mode & 0o777 == 0o700
    server.close()


def test_descriptors_and_files_do_not_leak(context: Context, local_endpoint: str) -> None:
    def round_trip() -> None:
        server, client = router(context, local_endpoint), dealer(context, local_endpoint, b"me")
        until(lambda: sent(client, [b"hello"]))
        assert receive(server)
        client.close()
        server.close()

    round_trip()
    before = num_fds()
    for _ in range(20):
        round_trip()
    until(lambda: num_fds() <= before)


# --- full and vanished peers ------------------------------------------------------------------------------


def test_a_full_router_says_so_and_drops_nothing(context: Context, endpoint: str) -> None:
    server = router(context, endpoint)
    with Child(DEALER, endpoint) as client:
        assert receive(server) == [b"child", b"hello"]
        count = fill(server, [b"child", b"x" * 1000])
        assert count >= socket_errors.HIGH_WATER_MARK
        client.order("count")
        assert not server.poll(300)  # a Unix socket sends what waits when it is looked at
        assert int(client.line()) == count
        until(lambda: sent(server, [b"child", b"room again"]))
    server.close()


def test_a_full_dealer_says_so_and_drops_nothing(context: Context, endpoint: str) -> None:
    with Child(ROUTER, endpoint) as server:
        assert server.line() == "bound"
        client = dealer(context, endpoint, b"me")
        until(lambda: sent(client, [b"x" * 1000]))
        count = 1 + fill(client, [b"x" * 1000])
        assert count >= socket_errors.HIGH_WATER_MARK
        server.order("count")
        assert not client.poll(300)
        assert server.line().split()[0] == str(count)
        until(lambda: sent(client, [b"room again"]))
        client.close()


def test_a_connection_that_is_told_of_takes_messages(context: Context) -> None:
    """ZeroMQ itself says EAGAIN for another millisecond when a send has just failed."""
    for number in range(10):
        endpoint = free_tcp_endpoint()
        client = dealer(context, endpoint, b"%d" % number)
        assert isinstance(client, TcpSocket)
        monitor = client.raw.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        server = router(context, endpoint)
        while not monitor.poll(0):
            sent(client, [b"too early?"])
        client.send([b"connected"])
        client.raw.disable_monitor()
        monitor.close(linger=0)
        client.close()
        server.close()


def test_peers_that_are_not_there_are_errors(context: Context, endpoint: str) -> None:
    lonely = dealer(context, endpoint, b"me")
    with pytest.raises(PeerFull, match="not connected"):
        lonely.send([b"anyone?"])
    server = router(context, endpoint)
    with pytest.raises(PeerGone):
        server.send([b"nobody", b"anyone?"])
    with Child(DEALER, endpoint) as client:
        assert receive(server) == [b"child", b"hello"]
        client.kill()
        until(lambda: not sent(server, [b"child", b"anyone?"]))
    with pytest.raises(PeerGone):
        server.send([b"child", b"anyone?"])
    lonely.close()
    server.close()


def test_a_message_larger_than_the_peer_takes_is_an_error(
    context: Context, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_errors, "MAX_MESSAGE_BYTES", 1000)
    server, client = router(context, endpoint), dealer(context, endpoint, b"me")
    until(lambda: sent(client, [b"x" * 1000]))
    with pytest.raises(MessageTooLarge, match="1001 bytes"):
        client.send([b"x", b"x" * 1001])
    with pytest.raises(MessageTooLarge, match="1004 bytes"):
        client.send([memoryview(np.zeros(251, np.int32))])
    assert receive(server) == [b"me", b"x" * 1000]
    client.close()
    server.close()


def test_messages_for_a_dead_process_do_not_reach_its_successor(context: Context, endpoint: str) -> None:
    """What waits in our own queue goes with the connection. (What does get through carries a dead incarnation.)"""
    with Child(ROUTER, endpoint) as first:
        assert first.line() == "bound"
        client = dealer(context, endpoint, b"me")
        until(lambda: sent(client, [b"hello"]))
        first.stop()  # it takes nothing more: the rest waits here and in the kernel
        count = sum(sent(client, [b"for the first".ljust(10_000)]) for _ in range(3000))
        assert count > 1000
        first.kill()
    with Child(ROUTER, endpoint) as second:
        assert second.line() == "bound"
        until(lambda: sent(client, [b"for the second"]))
        second.order("count")
        assert second.line() == "1 for the second"
    client.close()


def test_any_buffer_can_be_a_frame(context: Context, endpoint: str) -> None:
    server, client = router(context, endpoint), dealer(context, endpoint, b"me")
    until(lambda: sent(client, [b"hello"]))
    receive(server)
    ids = np.arange(100_000, dtype=np.int32)
    server.send([b"me", b"header", memoryview(ids)])
    server.send([b"me", bytearray(b"header"), memoryview(ids[5:7])])
    ids[:] = 0  # a frame is copied, or held until sent
    until(lambda: server.receive() or client.poll(0))  # both ends are ours: let the server send what waits
    assert client.receive() == [b"header", np.arange(100_000, dtype=np.int32).tobytes()]
    assert np.frombuffer(receive(client)[1], np.int32).tolist() == [5, 6]
    client.close()
    server.close()
