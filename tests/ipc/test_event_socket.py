"""EventSocket on both loops: every message is heard, whatever sends, failures and closings come between."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest
import uvloop

from ipc.sockets import Context, EventSocket, PeerFull, dealer, router
from tests.ipc.peers import ROUTER, fill, no_descriptors, sent, until
from tests.ipc.processes import Child

Run = Callable[[Coroutine[object, object, None]], None]


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    def run_it(scenario: Coroutine[object, object, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(scenario)

    return run_it


async def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.001)


@asynccontextmanager
async def echo(context: Context, endpoint: str) -> AsyncIterator[tuple[EventSocket, list[bytes]]]:
    """A connected client of a server that echoes, and what the client got."""
    loop = asyncio.get_running_loop()
    got: list[bytes] = []
    server = EventSocket(router(context, endpoint), lambda frames: server.send(frames), loop)
    connected = asyncio.Event()
    socket = dealer(context, endpoint, b"me")
    client = EventSocket(socket, lambda frames: got.append(frames[0]), loop, lambda up: connected.set())
    await asyncio.wait_for(connected.wait(), 10)
    yield client, got
    client.close()
    server.close()


def test_a_burst_is_heard_whole_and_in_order(run: Run, context: Context, endpoint: str) -> None:
    async def scenario() -> None:
        async with echo(context, endpoint) as (client, got):
            for number in range(1000):
                client.send([b"%d" % number])
            await eventually(lambda: len(got) >= 1000)
            assert got == [b"%d" % number for number in range(1000)]

    run(scenario())


def test_no_wake_up_is_lost_between_sends(run: Run, context: Context, endpoint: str) -> None:
    """Send and receive race on one socket: the descriptor signals once, and a send can take the signal."""

    async def scenario() -> None:
        async with echo(context, endpoint) as (client, got):
            for number in range(3000):
                client.send([b"%d" % number])
                if number % 3 == 0:
                    await asyncio.sleep(0)
                if number % 100 == 0:
                    await eventually(lambda number=number: len(got) == number + 1)
            await eventually(lambda: len(got) == 3000)

    run(scenario())


def test_a_full_peer_does_not_make_the_socket_deaf(run: Run, context: Context, endpoint: str) -> None:
    async def scenario() -> None:
        heard: list[int] = []
        connected = asyncio.Event()
        loop = asyncio.get_running_loop()
        with Child(ROUTER, endpoint) as child:
            assert child.line() == "bound"
            socket = dealer(context, endpoint, b"me")
            client = EventSocket(socket, lambda frames: heard.append(len(frames)), loop, lambda up: connected.set())
            await asyncio.wait_for(connected.wait(), 10)
            fill(socket, [b"x" * 1000])
            child.order("echo")  # the answer comes while sends fail
            fill(client, [b"x" * 1000])
            await eventually(lambda: heard)
            assert heard == [1]
            client.close()

    run(scenario())


def test_a_message_that_fails_does_not_stop_the_next(run: Run, context: Context, endpoint: str) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        failures: list[str] = []
        got: list[bytes] = []
        loop.set_exception_handler(lambda _, info: failures.append(str(info["exception"])))

        def on_message(frames: list[bytes]) -> None:
            if frames[1] == b"bad":
                raise ValueError("cannot do this")
            got.append(frames[1])

        server, client = EventSocket(router(context, endpoint), on_message, loop), dealer(context, endpoint, b"me")
        await eventually(lambda: sent(client, [b"bad"]))
        client.send([b"good"])
        await eventually(lambda: got == [b"good"])
        assert failures == ["cannot do this"]
        client.close()
        server.close()

    run(scenario())


def test_closing_while_messages_are_handled(run: Run, context: Context, endpoint: str) -> None:
    async def scenario() -> None:
        got: list[bytes] = []

        def on_message(frames: list[bytes]) -> None:
            got.append(frames[1])
            server.close()
            server.close()

        server = EventSocket(router(context, endpoint), on_message, asyncio.get_running_loop())
        client = dealer(context, endpoint, b"me")
        await eventually(lambda: sent(client, [b"1"]))
        sent(client, [b"2"])
        await eventually(lambda: got)
        await asyncio.sleep(0.05)
        assert got == [b"1"]
        client.close()

    run(scenario())


def test_connections_come_and_go(run: Run, context: Context, endpoint: str) -> None:
    """The moment a connection is told of, a send works."""

    async def scenario() -> None:
        changes: list[bool] = []

        def on_connection(connected: bool) -> None:
            changes.append(connected)
            if connected:
                client.send([b"hello"])

        socket = dealer(context, endpoint, b"me")
        client = EventSocket(socket, lambda frames: None, asyncio.get_running_loop(), on_connection)
        await asyncio.sleep(0.05)
        assert changes == []
        for life in (1, 2):
            with Child(ROUTER, endpoint) as server:
                await eventually(lambda life=life: len(changes) == 2 * life - 1)
                server.kill()
                await eventually(lambda life=life: len(changes) == 2 * life)
        assert changes == [True, False] * 2
        with pytest.raises(PeerFull):
            client.send([b"anyone?"])
        client.close()

    run(scenario())


def test_a_connection_made_before_anyone_watched_is_told(run: Run, context: Context, endpoint: str) -> None:
    async def scenario() -> None:
        server, early = router(context, endpoint), dealer(context, endpoint, b"me")
        await eventually(lambda: sent(early, [b"hello"]))
        changes: list[bool] = []
        client = EventSocket(early, lambda frames: None, asyncio.get_running_loop(), changes.append)
        await eventually(lambda: changes == [True])
        server.close()
        await eventually(lambda: changes == [True, False])
        client.close()

    run(scenario())


def test_an_end_that_nobody_saw_is_told(run: Run, context: Context, local_endpoint: str) -> None:
    """The next connection stood before the loop could look: what was in flight on the first is lost all the same."""

    async def scenario() -> None:
        changes: list[bool] = []
        loop = asyncio.get_running_loop()
        server = router(context, local_endpoint)
        client = EventSocket(dealer(context, local_endpoint, b"me"), lambda frames: None, loop, changes.append)
        await eventually(lambda: changes == [True])
        await asyncio.sleep(0.06)
        server.close()
        server = router(context, local_endpoint)
        until(lambda: sent(client, [b"hello"]))
        assert changes == [True]
        await eventually(lambda: changes == [True, False, True])
        assert server.receive() == [b"me", b"hello"]
        client.close()
        server.close()

    run(scenario())


def test_a_router_without_descriptors_goes_on_when_there_are_some(
    run: Run, context: Context, local_endpoint: str
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        failures: list[object] = []
        loop.set_exception_handler(lambda _, info: failures.append(info))
        got: list[list[bytes]] = []
        server = EventSocket(router(context, local_endpoint), got.append, loop)
        client = dealer(context, local_endpoint, b"me")
        client.send([b"hello"])
        with no_descriptors():
            cpu = time.process_time()
            await asyncio.sleep(0.3)
            assert time.process_time() - cpu < 0.1
            assert got == []
        await eventually(lambda: got == [[b"me", b"hello"]])
        assert failures == []
        client.close()
        server.close()

    run(scenario())


@pytest.mark.parametrize("spin_us", [0, 2000])
def test_the_loop_sleeps_when_nothing_comes(run: Run, context: Context, local_endpoint: str, spin_us: int) -> None:
    """Also after queues were full, and after it has spun."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        got: list[bytes] = []
        server = EventSocket(
            router(context, local_endpoint), lambda frames: got.append(frames[1]), loop, None, spin_us=spin_us
        )
        client = EventSocket(dealer(context, local_endpoint, b"me"), lambda frames: None, loop, None, spin_us)
        await eventually(lambda: sent(client, [b"0"]))
        count = 1
        for _ in range(20):
            while sent(client, [b"x" * 1000]) and count % 500:
                count += 1
            count += 1
            await asyncio.sleep(0)
        heard = -1
        while heard != len(got):
            heard = len(got)
            await asyncio.sleep(0.05)
        cpu = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - cpu < 0.1
        client.close()
        server.close()

    run(scenario())
