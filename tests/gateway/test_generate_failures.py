"""Generations whose client leaves, whose replica dies, whose time is over: ended at once, begun anew, or told why."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from ipc.submit import Rejected
from tests.gateway.conftest import MakeStack, Stack, until
from tests.gateway.fake_scheduler import FakeScheduler, chat_facts
from tests.gateway.test_completions import complete, events, ids, run, text_of

REQUEST: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 20}


@pytest.fixture
async def pair(make_stack: MakeStack, chat_dir: Path) -> Stack:
    """Two replicas that run a step when they are told to."""
    stack = await make_stack({"chat": (chat_dir, chat_facts())}, num_replicas=2)
    for scheduler in stack.schedulers.values():
        scheduler.generations.free = False
    return stack


def busy(stack: Stack) -> FakeScheduler:
    """The replica that has work."""
    return next(s for s in stack.schedulers.values() if s.generations.running)


async def lose(stack: Stack, scheduler: FakeScheduler) -> FakeScheduler:
    """The replica dies; gives the other one, which then runs freely."""
    name = next(name for name, other in stack.schedulers.items() if other is scheduler)
    del stack.schedulers[name]
    scheduler.close()
    other = next(iter(stack.schedulers.values()))
    other.generations.release()
    return other


async def started(stack: Stack, **fields: object) -> tuple["asyncio.Task[aiohttp.ClientResponse]", FakeScheduler]:
    """A request that has reached a replica."""
    task = asyncio.create_task(_post(stack, REQUEST | fields))
    await until(lambda: any(s.generations.running for s in stack.schedulers.values()))
    return task, busy(stack)


async def _post(stack: Stack, body: object, **headers: str) -> aiohttp.ClientResponse:
    return await stack.http.post("/v1/completions", json=body, headers=headers)


def parts(text: str) -> list[Any]:
    """Data of the events of a stream that need not have ended well."""
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


# ── a replica is lost ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_steps", [0, 5])
async def test_what_nobody_has_seen_begins_anew(pair: Stack, num_steps: int) -> None:
    task, scheduler = await started(pair, logprobs=1, echo=True)
    for _ in range(num_steps):
        scheduler.generations.step()
        await asyncio.sleep(0.02)
    other = await lose(pair, scheduler)
    async with await task as response:
        assert response.status == 200
        body = await response.json()
    assert body["choices"][0]["text"] == "hello" * 21
    assert body["usage"]["completion_tokens"] == 20
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 21
    first, second = scheduler.submits[0], other.submits[0]
    assert second.attempt == 2
    assert second.sampling == first.sampling  # its seed, too


async def test_a_stream_without_a_token_yet_begins_anew(pair: Stack) -> None:
    task, scheduler = await started(pair, stream=True)
    await lose(pair, scheduler)
    async with await task as response:
        found = parts(await response.text())
    assert found[-1] == "[DONE]"
    assert text_of(found[:-1]) == "hello" * 20


async def test_text_that_was_only_held_back_begins_anew(pair: Stack) -> None:
    task, scheduler = await started(pair, stream=True, stop="hellohello the")
    scheduler.generations.step()
    await asyncio.sleep(0.05)
    await lose(pair, scheduler)
    async with await task as response:
        assert text_of(parts(await response.text())[:-1]) == "hello" * 20


async def test_a_stream_that_has_begun_ends_with_an_error(pair: Stack) -> None:
    task, scheduler = await started(pair, stream=True)
    scheduler.generations.step()
    async with await task as response:
        other = await lose(pair, scheduler)
        found = parts(await response.text())
    assert found[0]["choices"][0]["text"] == "hello"
    error = found[-1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "replica_lost"
    assert not other.submits
    assert (await complete(pair, "the", max_tokens=1))[0] == 200


async def test_the_sdk_raises_the_error_of_a_stream(pair: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{pair.port}/v1", api_key="any") as client:
        making = asyncio.create_task(client.completions.create(model="chat", prompt="hello", stream=True))
        await until(lambda: any(s.generations.running for s in pair.schedulers.values()))
        scheduler = busy(pair)
        scheduler.generations.step()
        stream = await making
        await lose(pair, scheduler)
        with pytest.raises(openai.APIError, match="was lost"):
            async for _ in stream:
                pass


async def test_only_the_choice_that_was_lost_begins_anew(pair: Stack) -> None:
    task, _ = await started(pair, n=2)
    first, second = pair.schedulers["chat/0"], pair.schedulers["chat/1"]
    await until(lambda: bool(first.generations.running and second.generations.running))
    second.generations.step()
    await lose(pair, first)
    async with await task as response:
        body = await response.json()
    assert [c["text"] for c in body["choices"]] == ["hello" * 20] * 2
    assert [submit.attempt for submit in second.submits] == [1, 2]


async def test_given_back_by_a_replica_that_stops(pair: Stack) -> None:
    task, scheduler = await started(pair)
    sequence = next(iter(scheduler.generations.running.values()))
    scheduler.generations.running.clear()
    scheduler.send_raw(reject(sequence.identity, sequence.submit, "draining"))
    other = next(s for s in pair.schedulers.values() if s is not scheduler)
    other.generations.release()
    async with await task as response:
        assert (await response.json())["choices"][0]["text"] == "hello" * 20


def reject(identity: bytes, submit: Any, code: Any) -> list[bytes]:
    from ipc.codec import encode

    return [identity, encode(Rejected(submit.gateway, submit.chunk_id, code, "as told"))]


@pytest.mark.parametrize(("code", "status"), [("full", 429), ("invalid", 400), ("non_finite", 422), ("lost", 503)])
async def test_refusals(chat_stack: Stack, code: Any, status: int) -> None:
    scheduler = chat_stack.schedulers["chat/0"]
    scheduler.reject = lambda submit: Rejected(submit.gateway, submit.chunk_id, code, "as told", index=0)
    for stream in (False, True):
        found, body = await complete(chat_stack, ["a", "b"], stream=stream)
        assert found == status, body
        if code == "invalid":
            assert body["error"]["param"] == "prompt[0]"
    found, body = await chat_stack.post(
        "/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "a"}]}
    )
    assert found == status
    if code == "invalid":
        assert body["error"]["param"] == "messages"
    scheduler.reject = None
    assert (await complete(chat_stack))[0] == 200


async def test_a_choice_that_fails_ends_the_others(chat_stack: Stack) -> None:
    scheduler = chat_stack.schedulers["chat/0"]
    scheduler.generations.free = False
    scheduler.reject = lambda submit: (
        Rejected(submit.gateway, submit.chunk_id, "non_finite", "NaN") if len(scheduler.submits) == 3 else None
    )
    status, _ = await complete(chat_stack, n=4)
    assert status == 422
    await until(lambda: len(scheduler.aborts) == 3)
    assert not scheduler.generations.running


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_deadline_before_the_first_token_is_a_504(chat_stack: Stack) -> None:
    scheduler = chat_stack.schedulers["chat/0"]
    scheduler.generations.free = False
    for stream in (False, True):
        async with await _post(chat_stack, REQUEST | {"stream": stream}, **{"X-Timeout-Ms": "150"}) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "deadline_exceeded"
    await until(lambda: [abort.reason for abort in scheduler.aborts] == ["deadline"] * 2)


async def test_a_deadline_after_it_is_an_error_event(chat_stack: Stack) -> None:
    scheduler = chat_stack.schedulers["chat/0"]
    scheduler.generations.step_s = 0.02
    async with await _post(
        chat_stack, REQUEST | {"stream": True, "max_tokens": 1000}, **{"X-Timeout-Ms": "300"}
    ) as response:
        assert response.status == 200
        found = parts(await response.text())
    assert found[-1]["error"]["code"] == "deadline_exceeded"
    assert len(found) > 3
    async with chat_stack.http.get("/metrics") as response:
        assert 'route="/v1/completions",status="504"} 1' in await response.text()
    await until(lambda: [abort.reason for abort in scheduler.aborts] == ["deadline"])


async def test_generations_have_more_time_than_embeddings(make_stack: MakeStack, chat_dir: Path) -> None:
    stack = await make_stack({"chat": (chat_dir, chat_facts())}, timeout_ms=10, generation_timeout_ms=10_000)
    stack.schedulers["chat/0"].generations.step_s = 0.01
    assert (await complete(stack, max_tokens=5))[0] == 200


async def test_a_quiet_stream_sends_comments(make_stack: MakeStack, chat_dir: Path) -> None:
    stack = await make_stack({"chat": (chat_dir, chat_facts())}, keep_alive_ms=50)
    generations = stack.schedulers["chat/0"].generations
    generations.free = False
    async with await _post(stack, REQUEST | {"stream": True}) as response:
        assert response.status == 200  # before any token
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        generations.release()
        text = await response.text()
    assert text_of(parts(text)[:-1]) == "hello" * 20


# ── clients ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 3])
async def test_a_client_that_leaves_ends_its_generation(chat_stack: Stack, stream: bool, num_steps: int) -> None:
    scheduler = chat_stack.schedulers["chat/0"]
    scheduler.generations.free = False
    body = json.dumps(REQUEST | {"stream": stream, "n": 2}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", chat_stack.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await until(lambda: len(scheduler.generations.running) == 2)
    for _ in range(num_steps):
        scheduler.generations.step()
        await asyncio.sleep(0.02)
    if stream and num_steps:
        assert b"200 OK" in await reader.readuntil(b"\r\n")
    writer.close()
    await until(lambda: [abort.reason for abort in scheduler.aborts] == ["disconnect"] * 2)
    assert not scheduler.generations.running


async def test_a_client_that_does_not_read_holds_up_nobody_and_is_cut_off(chat_stack: Stack) -> None:
    """Its stream is large; what is kept for it here stays small, others go on, and at its deadline it is over."""
    scheduler = chat_stack.schedulers["chat/0"]
    scheduler.generations.step_s, scheduler.generations.tokens_per_step = 0.01, 4
    body = json.dumps(REQUEST | {"stream": True, "max_tokens": 2000, "n": 16, "logprobs": 20}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", chat_stack.port, limit=1024)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Timeout-Ms: 1500\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n"
    )
    writer.write(head % len(body) + body)
    await until(lambda: bool(scheduler.submits))
    assert text_of(await events(chat_stack, prompt="the", max_tokens=5)) == "the" * 5
    await until(lambda: [abort.reason for abort in scheduler.aborts] == ["deadline"] * 16, 10)
    received = b""
    with contextlib.suppress(ConnectionError):
        while block := await asyncio.wait_for(reader.read(1 << 20), 10):
            received += block
    assert b"[DONE]" not in received
    assert len(received) < 20 << 20  # most of it lay in the kernel's buffers; all would be about 60 MiB
    writer.close()


async def test_what_is_kept_for_a_client_is_bounded(make_stack: MakeStack, chat_dir: Path) -> None:
    stack = await make_stack({"chat": (chat_dir, chat_facts())}, max_unsent_tokens=100)
    assert (await complete(stack, max_tokens=100))[0] == 200
    for fields in ({"max_tokens": 101}, {"max_tokens": 60, "n": 2}, {"max_tokens": 10, "logprobs": 10}):
        status, body = await complete(stack, **fields)
        assert (status, body["error"]["code"]) == (413, "answer_too_large")
    assert text_of(await events(stack, prompt="hello", max_tokens=500)) == "hello" * 500
    stack.schedulers["chat/0"].generations.tokens_per_step = 200
    async with await _post(stack, REQUEST | {"stream": True, "max_tokens": 300}) as response:
        assert (await response.json())["error"]["code"] == "client_too_slow"  # or the replica too fast


async def test_one_long_stream_does_not_starve_others(chat_stack: Stack) -> None:
    scheduler = chat_stack.schedulers["chat/0"]
    scheduler.generations.step_s = 0.001
    streams = [asyncio.create_task(events(chat_stack, prompt="hello", max_tokens=100)) for _ in range(20)]
    found = await asyncio.gather(*streams)
    assert all(text_of(stream) == "hello" * 100 for stream in found)
    assert all(len(stream) > 20 for stream in found)


async def test_metrics(chat_stack: Stack) -> None:
    run(chat_stack, [*ids("hello"), 2])
    await complete(chat_stack)
    run(chat_stack, ids("the") * 3)
    await events(chat_stack, prompt="a")
    assert await chat_stack.metric("bouquet_generated_tokens_total") == 5
    assert await chat_stack.metric("bouquet_first_token_seconds_count") == 2
    assert await chat_stack.metric("bouquet_inter_token_seconds_count") == 3
    async with chat_stack.http.get("/metrics") as response:
        text = await response.text()
    for reason in ("stop", "length"):
        assert f'bouquet_generations_total{{process="gateway/0",finish_reason="{reason}"}} 1' in text


async def test_a_gateway_that_stops_tells_its_streams(make_stack: MakeStack, chat_dir: Path) -> None:
    stack = await make_stack({"chat": (chat_dir, chat_facts())}, drain_timeout_ms=400)
    scheduler = stack.schedulers["chat/0"]
    scheduler.generations.step_s = 0.01
    async with await _post(stack, REQUEST | {"stream": True, "max_tokens": 2000}) as response:
        stack.stop.set()
        found = parts(await response.text())
    assert len(found) > 5  # it went on for a while
    assert found[-1]["error"]["code"] == "draining"
    await asyncio.wait_for(stack.task, 5)
    assert scheduler.aborts
