"""Replies that a gateway's socket does not take, and gateways that go: nothing is lost in silence."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ipc.codec import TO_GATEWAY, TO_SCHEDULER, encode
from ipc.control import PROBE_INDEX, Heartbeat, Hello, Quarantine, Status
from ipc.sockets import EndpointInUse, Frame, PeerFull, PeerGone
from ipc.submit import Rejected, Submit
from scheduler import gateway_link
from scheduler.config import SchedulerConfig
from scheduler.gateway_link import GatewayLink
from scheduler.planner import Reply
from scheduler.stats import Stats


class Events:
    """The loop's side, recorded."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []
        self.gone: list[tuple[int, int | None]] = []

    def on_submit(self, submit: Submit, frame: bytes) -> None:
        self.submits.append(submit)

    def on_abort(self, gateway: int, chunk_id: int | None, reason: str) -> None:
        self.gone.append((gateway, chunk_id))

    def on_quarantine(self, message: Quarantine) -> None: ...

    def status(self) -> Status:
        return Status(1, "ready")

    def quarantine_entries(self) -> list[Quarantine]:
        return []


class Wire:
    """Stands for the socket: takes as many messages as it is told to."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.gone = False
        self.sent: list[list[Frame]] = []
        self.socket = self

    def send(self, frames: list[Frame]) -> None:
        if self.gone:
            raise PeerGone("no such peer")
        if self.room == 0:
            raise PeerFull("full")
        self.room -= 1
        self.sent.append(frames)

    def receive(self) -> None:
        return None


@pytest.fixture
async def link(tmp_path: Path) -> "Iterator[tuple[GatewayLink, Wire, Events, Stats]]":
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events, stats, wire = Events(), Stats("r"), Wire()
    config = SchedulerConfig(gateway_heartbeat_ms=1000)
    made = GatewayLink(context, f"ipc://{tmp_path}/g.sock", 1, config, stats, events, lambda *_, **__: None)
    real, made._sockets = made._sockets[0], [wire]  # type: ignore[list-item]
    made._on_message(wire, [b"id", encode(Submit(5, 1, 1, [1], 100)), b"\0\0\0\0"])  # type: ignore[arg-type]
    yield made, wire, events, stats
    real.close()
    context.destroy(linger=0)


def _reply(chunk: int, gateway: int = 5) -> Reply:
    return Reply(gateway, Rejected(gateway, chunk, "full", ""), None)


def _chunks(wire: Wire) -> list[bytes]:
    return [bytes(frames[1]) for frames in wire.sent]


async def test_what_a_full_socket_does_not_take_waits_in_order(link: tuple[GatewayLink, Wire, Events, Stats]) -> None:
    made, wire, events, stats = link
    wire.room = 1
    made.reply([_reply(chunk) for chunk in range(5)])
    assert len(wire.sent) == 1
    wire.room = 2
    made.reply([_reply(5)])  # not before those that wait
    wire.room = 100
    now = asyncio.get_running_loop().time()
    made.check(now)
    assert _chunks(wire) == [encode(_reply(chunk).message) for chunk in range(6)]
    assert (events.gone, stats.num_undeliverable) == ([], 0)


async def test_a_gateway_that_takes_nothing_for_too_long_is_gone(
    link: tuple[GatewayLink, Wire, Events, Stats], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, wire, events, stats = link
    monkeypatch.setattr(gateway_link, "MAX_BACKLOG", 10)
    wire.room = 0
    made.reply([_reply(chunk) for chunk in range(20)])
    assert events.gone == [(5, None)]  # its work is dropped
    assert made.incarnations == []
    assert stats.num_undeliverable == 20


async def test_an_unreachable_gateway_is_gone_at_once(link: tuple[GatewayLink, Wire, Events, Stats]) -> None:
    made, wire, events, stats = link
    wire.gone = True
    made.reply([_reply(1), _reply(2)])
    assert events.gone == [(5, None)]
    assert stats.num_undeliverable == 2


async def test_a_reply_to_a_gateway_never_seen_is_counted(link: tuple[GatewayLink, Wire, Events, Stats]) -> None:
    made, wire, _, stats = link
    made.reply([_reply(1, gateway=99)])
    assert (wire.sent, stats.num_undeliverable) == ([], 1)


async def test_a_gateway_dropped_and_taken_again_has_another_registration(
    link: tuple[GatewayLink, Wire, Events, Stats], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, wire, events, _ = link
    monkeypatch.setattr(gateway_link, "MAX_BACKLOG", 2)

    def registrations() -> list[int]:
        made._on_message(wire, [b"id", encode(Heartbeat(5))])
        made.broadcast(Status(1, "ready"))
        statuses = [TO_GATEWAY.decode(body) for body in _chunks(wire)]
        return [status.registration for status in statuses if isinstance(status, Status)]

    first = registrations()
    assert len(set(first)) == 1
    wire.room = 0
    made.reply([_reply(chunk) for chunk in range(4)])
    assert events.gone == [(5, None)]
    wire.room = 100
    later = registrations()[2:]
    assert len(later) == 2
    assert len(set(first + later)) == 2


async def test_who_only_asks_for_a_status_is_no_gateway(link: tuple[GatewayLink, Wire, Events, Stats]) -> None:
    made, wire, _, stats = link
    made._on_message(wire, [b"probe", encode(Hello(99, "gateway", PROBE_INDEX, 1))])
    assert wire.sent[-1][0] == b"probe"
    assert isinstance(TO_GATEWAY.decode(bytes(wire.sent[-1][1])), Status)
    wire.gone = True
    made._on_message(wire, [b"probe", encode(Hello(99, "gateway", PROBE_INDEX, 1))])
    assert (made.incarnations, stats.num_undeliverable) == ([5], 0)


async def test_a_submit_of_too_few_frames_still_reaches_the_door(link: tuple[GatewayLink, Wire, Events, Stats]) -> None:
    made, wire, events, _ = link
    made._on_message(wire, [b"id", encode(Submit(5, 1, 2, [1], 100))])
    assert [submit.chunk_id for submit in events.submits] == [1, 2]  # which rejects it by its size
    assert isinstance(TO_SCHEDULER.decode(encode(events.submits[1])), Submit)


async def test_a_scheduler_also_listens_on_tcp(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with zmq.Context() as context:
        events = Events()
        config = SchedulerConfig(listen=f"tcp://127.0.0.1:{port}")
        opened = GatewayLink(context, f"ipc://{tmp_path}/g", 1, config, Stats("m/0"), events, lambda *_, **__: None)
        far = context.socket(zmq.DEALER)
        far.connect(f"tcp://127.0.0.1:{port}")
        far.send_multipart([encode(Hello(7, "gateway", 0, 1))])
        async with asyncio.timeout(20):
            while not far.poll(0):
                await asyncio.sleep(0.01)
        assert isinstance(TO_GATEWAY.decode(far.recv_multipart(zmq.DONTWAIT)[0]), Status)
        with pytest.raises(EndpointInUse, match="cannot bind tcp"):
            GatewayLink(context, f"ipc://{tmp_path}/h", 1, config, Stats("m/1"), events, lambda *_, **__: None)
        opened.close()
        far.close(linger=0)
