"""Time and room: deadlines, disconnects, slow clients, too many requests, and an orderly end."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
from aiohttp import web

from gateway.answer import Answer
from gateway.app import bind, serve
from gateway.config import GatewayConfig
from gateway.models import ModelFilesError
from gateway.replicas import ReplicaWatcher
from gateway.server import HttpServer
from tests.gateway.conftest import MakeStack, Stack, free_port, until
from tests.gateway.fake_scheduler import FakeScheduler, facts

BODY = b'{"model": "tiny", "input": "hello"}'
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


async def test_deadline_is_a_504_and_an_abort(stack: Stack) -> None:
    scheduler = stack.schedulers["tiny/0"]
    scheduler.hold = True
    status, body = await stack.post("/v1/embeddings", {"model": "tiny", "input": "a"}, X_Timeout_Ms="100")
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: bool(scheduler.aborts))
    assert [(a.chunk_id, a.reason) for a in scheduler.aborts] == [(scheduler.submits[0].chunk_id, "deadline")]
    assert 0 < scheduler.submits[0].timeout_ms <= 100
    scheduler.hold = False
    assert (await stack.embed())[0] == 200


async def test_deadline_of_one_that_waits_for_a_replica(stack: Stack) -> None:
    scheduler = stack.schedulers["tiny/0"]
    scheduler.state = "starting"
    scheduler.tell_status()
    await asyncio.sleep(0.05)
    status, body = await stack.post("/v1/embeddings", {"model": "tiny", "input": "a"}, X_Timeout_Ms="100")
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    scheduler.state = "ready"
    scheduler.tell_status()
    assert (await stack.embed("b"))[0] == 200
    assert len(scheduler.submits) == 1  # the one that had waited was forgotten


async def test_default_deadline_is_configured(make_stack: MakeStack) -> None:
    stack = await make_stack(timeout_ms=100)
    stack.schedulers["tiny/0"].hold = True
    assert (await stack.embed())[0] == 504


async def test_disconnect_aborts_every_chunk(make_stack: MakeStack) -> None:
    stack = await make_stack(max_chunk_tokens=8)
    scheduler = stack.schedulers["tiny/0"]
    scheduler.hold = True
    body = json.dumps({"model": "tiny", "input": ["a tulip is red"] * 3}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(HEAD % len(body) + body)
    await until(lambda: len(scheduler.held) == 3)
    writer.close()
    await until(lambda: len(scheduler.aborts) == 3)
    assert {abort.reason for abort in scheduler.aborts} == {"disconnect"}
    assert not scheduler.held
    scheduler.hold = False
    assert (await stack.embed())[0] == 200


async def test_too_many_at_once_is_a_429_before_anything_is_read(make_stack: MakeStack) -> None:
    stack = await make_stack(max_concurrent_requests=2)
    scheduler = stack.schedulers["tiny/0"]
    scheduler.hold = True
    busy = [asyncio.create_task(stack.embed()) for _ in range(2)]
    await until(lambda: len(scheduler.held) == 2)
    async with stack.http.post("/v1/embeddings", data=b"not even JSON") as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        error = (await response.json())["error"]
        assert error["code"] == "overloaded"
        assert "its 2 requests in all, 2 for each model (max_concurrent_requests)" in error["message"]
    scheduler.hold = False
    scheduler.release()
    assert [status for status, _ in await asyncio.gather(*busy)] == [200, 200]
    assert (await stack.embed())[0] == 200


async def test_requests_that_wait_for_a_dead_model_take_no_place_of_another(
    make_stack: MakeStack, tiny_dir: Path
) -> None:
    stack = await make_stack({"dead": (tiny_dir, None), "live": (tiny_dir, None)}, max_concurrent_requests=3)
    dead, live = stack.schedulers["dead/0"], stack.schedulers["live/0"]
    live.hold = True
    dead.close()
    waiting = [asyncio.create_task(stack.embed(model="dead")) for _ in range(3)]
    async with asyncio.timeout(5):
        while await stack.metric("bouquet_chunks_waiting") < 3:
            await asyncio.sleep(0.01)
    busy = [asyncio.create_task(stack.embed(model="live")) for _ in range(3)]
    await until(lambda: len(live.held) == 3)
    for name in ("dead", "live"):
        status, body = await stack.embed(model=name)
        assert (status, body["error"]["code"]) == (429, "overloaded")
    live.release()
    assert [status for status, _ in await asyncio.gather(*busy)] == [200] * 3
    assert not any(answer.done() for answer in waiting)
    stack.schedulers["dead/0"] = FakeScheduler(dead.endpoint)
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 3


async def test_what_is_refused_for_one_model_leaves_no_place_taken(make_stack: MakeStack, tiny_dir: Path) -> None:
    stack = await make_stack({"a": (tiny_dir, None), "b": (tiny_dir, None)}, max_concurrent_requests=1)
    stack.schedulers["a/0"].hold = True
    busy = asyncio.create_task(stack.embed(model="a"))
    await until(lambda: bool(stack.schedulers["a/0"].held))
    for _ in range(3):
        status, body = await stack.embed(model="a")
        assert status == 429
        assert "1 requests for model 'a' (max_concurrent_requests)" in body["error"]["message"]
        assert (await stack.embed(model="b"))[0] == 200
    stack.schedulers["a/0"].release()
    assert (await busy)[0] == 200


async def test_a_slow_body_is_a_408(make_stack: MakeStack) -> None:
    stack = await make_stack(body_timeout_ms=100)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(HEAD % len(BODY) + BODY[:5])
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    writer.close()
    assert (await stack.embed())[0] == 200


@pytest.mark.parametrize("start", [b"", b"POST /v1/embed", b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\n"])
async def test_a_slow_head_ends_the_connection(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr("gateway.server.SWEEP_S", 0.05)
    stack = await make_stack(header_timeout_ms=400)  # read by then: what is closed unread is reset, not ended
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(start)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert (await stack.embed())[0] == 200
    await asyncio.sleep(0.6)  # a connection that has spoken is left alone
    assert (await stack.embed())[0] == 200


async def test_a_client_that_reads_nothing_is_cut_off(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, tiny_dir: Path
) -> None:
    monkeypatch.setattr("gateway.server.SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.server.STALLED_S", 0.2)
    stack = await make_stack({"tiny": (tiny_dir, facts(dimension=4096))})
    body = json.dumps({"model": "tiny", "input": ["a"] * 300}).encode()  # an answer of about 13 MB
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", stack.port))
    client.sendall(HEAD % len(body) + body)
    await until(lambda: bool(stack.schedulers["tiny/0"].submits))
    await asyncio.sleep(1.5)
    assert (await stack.embed())[0] == 200
    client.settimeout(5)
    answer = b""
    while part := client.recv(1 << 20):
        answer += part
    client.close()
    head, _, start = answer.partition(b"\r\n\r\n")
    assert len(start) < int(head.lower().partition(b"content-length:")[2].split()[0])


async def test_pipelined_requests_are_answered_in_order(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    bodies = [json.dumps({"model": "tiny", "input": ["a"] * n}).encode() for n in (3, 1, 2)]
    writer.write(b"".join(HEAD % len(body) + body for body in bodies))
    counts = []
    for _ in bodies:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        counts.append(len(json.loads(await reader.readexactly(length))["data"]))
    assert counts == [3, 1, 2]
    writer.close()


@pytest.mark.parametrize(
    ("request_line", "connection", "expected", "closes"),
    [
        ("GET /health/live HTTP/1.1", None, None, False),
        ("GET /health/live HTTP/1.1", "close", "close", True),
        ("GET /health/live HTTP/1.0", None, None, True),
        ("GET /health/live HTTP/1.0", "keep-alive", "keep-alive", False),
        ("HEAD /health/live HTTP/1.1", "close", "close", True),
        ("GET /no/such/path HTTP/1.1", "close", "close", True),
    ],
)
async def test_connections_are_kept_as_asked(
    stack: Stack, request_line: str, connection: str | None, expected: str | None, closes: bool
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    asked = "" if connection is None else f"Connection: {connection}\r\n"
    writer.write(f"{request_line}\r\nHost: x\r\n{asked}\r\n".encode())
    start, *lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    assert start.split()[:2] == [request_line.split()[2], "404" if "such" in request_line else "200"]
    assert headers.get("Connection") == expected
    assert {"Date", "Server", "Content-Type"} <= headers.keys()
    length = int(headers["Content-Length"])
    assert length > 0
    if not request_line.startswith("HEAD"):
        json.loads(await asyncio.wait_for(reader.readexactly(length), 5))
    if closes:
        assert await asyncio.wait_for(reader.read(), 5) == b""
    else:
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_drain_answers_what_is_in_flight_and_closes_the_rest(stack: Stack) -> None:
    scheduler = stack.schedulers["tiny/0"]
    assert (await stack.embed())[0] == 200  # leaves an idle connection behind
    scheduler.hold = True
    answer = asyncio.create_task(
        stack.http.post("/v1/embeddings", data=BODY, headers={"Content-Type": "application/json"})
    )
    await until(lambda: bool(scheduler.held))
    stack.stop.set()
    await asyncio.sleep(0.3)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", stack.port)
    assert not stack.task.done()
    scheduler.release()
    async with await answer as response:
        assert response.status == 200
        assert response.headers["Connection"] == "close"
    await asyncio.wait_for(stack.task, 5)


async def test_connections_that_the_kernel_has_queued_are_answered_before_the_end() -> None:
    async def hello(_: web.BaseRequest) -> Answer:
        return Answer(b"hello")

    config = GatewayConfig(port=free_port())
    server = HttpServer(hello, config)
    with bind(config.host, config.port) as listener:
        await server.listen(listener)
        queued = [socket.create_connection(("127.0.0.1", config.port)) for _ in range(5)]  # the loop stands still
        for client in queued:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await server.drain()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", config.port))
        await server.close()
    for client in queued:
        with client:
            assert client.recv(1000).startswith(b"HTTP/1.1 200")


async def test_an_error_of_the_watcher_ends_the_process(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = await make_stack()

    def broken(self: ReplicaWatcher) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(ReplicaWatcher, "poll", broken)
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(asyncio.shield(stack.task), 10)
    stack.task = asyncio.create_task(asyncio.sleep(0))


async def test_drain_ends_at_its_timeout(make_stack: MakeStack) -> None:
    stack = await make_stack(drain_timeout_ms=200)
    scheduler = stack.schedulers["tiny/0"]
    scheduler.hold = True
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(HEAD % len(BODY) + BODY)
    await until(lambda: bool(scheduler.held))
    stack.stop.set()
    await asyncio.wait_for(stack.task, 5)
    await until(lambda: bool(scheduler.aborts))  # nobody works for a gateway that has left
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"code":"draining"' in answer
    writer.close()


async def test_gateways_share_a_port(make_stack: MakeStack, tiny_dir: Path) -> None:
    stack = await make_stack()
    stop, events = asyncio.Event(), list[str]()
    second = asyncio.create_task(
        serve(
            config=GatewayConfig(port=stack.port),
            models={"tiny": tiny_dir},
            run_dir=stack.run_dir,
            index=1,
            stop=stop,
            log=lambda event, **_: events.append(event),
        )
    )
    await until(lambda: "listening" in events)
    assert len(stack.schedulers["tiny/0"].gateways) == 2
    stop.set()
    await asyncio.wait_for(second, 5)
    assert (await stack.embed())[0] == 200


async def test_a_port_that_is_taken_is_an_error() -> None:
    port = free_port()
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", port)
    with pytest.raises(OSError):
        bind("127.0.0.1", port)
    server.close()
    await server.wait_closed()


async def test_a_model_without_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFilesError, match=r"'broken'.*tokenizer\.json"):
        await serve(
            config=GatewayConfig(port=free_port()),
            models={"broken": tmp_path},
            run_dir=tmp_path,
            index=0,
            stop=asyncio.Event(),
            log=lambda event, **_: None,
        )
