"""Schedulers that die, hang, drain, refuse or come back: every request is answered right, or told why not."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.client import RECENTLY_S
from gateway.config import GatewayConfig
from gateway.link import SILENCE_S
from ipc.codec import encode
from ipc.control import Quarantine
from ipc.submit import Rejected, Result, Submit
from ipc.types import Timings
from tests.gateway.conftest import MakeStack, Stack, tiny_tokenizer, until
from tests.gateway.fake_scheduler import FakeScheduler, vector


def check(answer: tuple[int, Any], text: str = "hello world") -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    status, body = answer
    assert status == 200, body
    np.testing.assert_allclose(body["data"][0]["embedding"], vector(tokenizer.encode(text).ids), rtol=1e-6)


async def test_work_of_a_dead_replica_goes_to_another(make_stack: MakeStack) -> None:
    stack = await make_stack(num_replicas=2)
    first, second = stack.schedulers["tiny/0"], stack.schedulers["tiny/1"]
    first.hold = second.hold = True
    answers = [asyncio.create_task(stack.embed(f"tulip {i}")) for i in range(20)]
    await until(lambda: len(first.held) + len(second.held) == 20)
    assert len(first.held) == len(second.held) == 10  # shared evenly
    second.hold = False
    second.release()
    first.close()
    for i, answer in enumerate(await asyncio.gather(*answers)):
        check(answer, f"tulip {i}")
    assert [submit.attempt for submit in second.submits] == [1] * 10 + [2] * 10
    assert await stack.metric("bouquet_failovers_total") == 10
    del stack.schedulers["tiny/0"]


async def test_work_waits_for_a_replica_that_is_reborn(stack: Stack) -> None:
    old = stack.schedulers["tiny/0"]
    old.hold = True
    in_flight = asyncio.create_task(stack.embed())
    await until(lambda: bool(old.held))
    old.close()
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(stack.embed("red"))
    await asyncio.sleep(0.1)
    assert not in_flight.done()
    assert not waiting.done()
    new = stack.schedulers["tiny/0"] = FakeScheduler(old.endpoint)
    check(await in_flight)
    check(await waiting, "red")
    assert sorted(submit.attempt for submit in new.submits) == [1, 2]
    assert all(submit.scheduler == new.incarnation for submit in new.submits)


async def test_waiting_ends_after_a_while(make_stack: MakeStack) -> None:
    stack = await make_stack(replica_wait_ms=100)
    stack.schedulers.pop("tiny/0").close()
    await asyncio.sleep(0.1)
    status, body = await stack.embed()
    assert (status, body["error"]["code"]) == (503, "not_ready")


def test_requests_wait_as_long_as_a_replica_is_expected_back() -> None:
    assert GatewayConfig().replica_wait_ms == RECENTLY_S * 1000


async def test_a_model_that_never_was_there_is_refused_at_once(make_stack: MakeStack, tiny_dir: Path) -> None:
    stack = await make_stack()
    stack.schedulers["tiny/0"].close()
    empty = await make_stack(num_replicas=0, replica_wait_ms=60_000)  # had it waited, this would take a minute
    before = asyncio.get_running_loop().time()
    async with empty.http.post("/v1/embeddings", json={"model": "tiny", "input": "a"}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "not_ready"
    assert asyncio.get_running_loop().time() - before < 30
    assert await empty.ready() == 503
    del stack.schedulers["tiny/0"]


async def test_three_lost_replicas_are_enough(stack: Stack) -> None:
    answer = asyncio.create_task(stack.embed())
    for _ in range(3):
        scheduler = stack.schedulers["tiny/0"]
        scheduler.hold = True
        await until(lambda scheduler=scheduler: bool(scheduler.held))  # type: ignore[misc]
        scheduler.close()
        stack.schedulers["tiny/0"] = FakeScheduler(scheduler.endpoint)
        stack.schedulers["tiny/0"].hold = True
    status, body = await answer
    assert (status, body["error"]["code"]) == (503, "replica_lost")
    stack.schedulers["tiny/0"].hold = False
    check(await stack.embed())


async def test_a_silent_replica_is_ejected_and_its_late_answers_dropped(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.link.SILENCE_S", 0.3)
    monkeypatch.setattr("gateway.client.HEARTBEAT_S", 0.1)
    stack = await make_stack(num_replicas=2)
    first, second = stack.schedulers["tiny/0"], stack.schedulers["tiny/1"]
    first.hold = second.hold = True
    answers = [asyncio.create_task(stack.embed(f"tulip {i}")) for i in range(4)]
    await until(lambda: len(first.held) == len(second.held) == 2)
    first.silent = True
    late = list(first.held)
    await until(lambda: len(second.held) == 4)
    second.release()
    for i, answer in enumerate(await asyncio.gather(*answers)):
        check(answer, f"tulip {i}")
    first.silent = False
    for item in late:
        first.answer(*item)
    await asyncio.sleep(0.1)
    assert await stack.metric("bouquet_late_replies_total") == 2
    first.hold = second.hold = False
    for _ in range(4):
        check(await stack.embed())


async def test_work_is_sent_again_after_a_standstill_of_our_own(stack: Stack) -> None:
    """The scheduler has given the silent gateway up, and will never answer."""
    scheduler = stack.schedulers["tiny/0"]
    scheduler.hold = True
    answer = asyncio.create_task(stack.embed())
    await until(lambda: bool(scheduler.held))
    scheduler.held.clear()
    scheduler.hold = False
    scheduler.tell_status()  # heard before the next tick, so the link looks alive
    time.sleep(SILENCE_S + 0.6)  # noqa: ASYNC251 - the whole loop stands still
    check(await answer)
    assert [submit.attempt for submit in scheduler.submits] == [1, 2]


async def test_a_stale_submit_is_sent_again(stack: Stack) -> None:
    scheduler = stack.schedulers["tiny/0"]
    scheduler.incarnation += 1  # another life behind the same connection, unknown to the gateway
    check(await stack.embed())
    assert [submit.scheduler == scheduler.incarnation for submit in scheduler.submits] == [False, True]
    assert scheduler.submits[-1].attempt == 1  # nothing was lost by it


async def test_what_was_given_back_waits_longer_than_what_is_new(make_stack: MakeStack) -> None:
    stack = await make_stack(replica_wait_ms=100)
    scheduler = stack.schedulers["tiny/0"]
    scheduler.state, scheduler.reject = "starting", "not_ready"
    given_back = asyncio.create_task(stack.embed())
    await until(lambda: bool(scheduler.submits))
    status, _ = await stack.embed("red")
    assert status == 503
    assert not given_back.done()
    scheduler.state, scheduler.reject = "ready", None
    scheduler.tell_status()
    check(await given_back)
    assert [submit.attempt for submit in scheduler.submits] == [1, 1]


@pytest.mark.parametrize("code", ["draining", "not_ready"])
async def test_a_replica_that_takes_nothing_now_is_passed_over(make_stack: MakeStack, code: Any) -> None:
    stack = await make_stack(num_replicas=2)
    stack.schedulers["tiny/0"].reject = code
    for _ in range(6):
        check(await stack.embed())
    assert len(stack.schedulers["tiny/1"].submits) == 6
    assert len(stack.schedulers["tiny/0"].submits) <= 2


async def test_alone_and_not_ready_means_waiting(stack: Stack) -> None:
    scheduler = stack.schedulers["tiny/0"]
    scheduler.state = "starting"
    scheduler.tell_status()
    await asyncio.sleep(0.05)
    answer = asyncio.create_task(stack.embed())
    await asyncio.sleep(0.2)
    assert not answer.done()
    assert not scheduler.submits
    assert await stack.ready() == 503
    scheduler.state = "ready"
    scheduler.tell_status()
    check(await answer)
    assert await stack.ready() == 200


@pytest.mark.parametrize(
    ("code", "status", "error_code"),
    [
        ("full", 429, "overloaded"),
        ("invalid", 400, "invalid_value"),
        ("quarantined", 422, "request_quarantined"),
        ("lost", 503, "replica_lost"),
        ("expired", 504, "deadline_exceeded"),
        ("non_finite", 422, "non_finite_output"),
        ("out_of_memory", 413, "out_of_memory"),
    ],
)
async def test_refusals(stack: Stack, code: Any, status: int, error_code: str) -> None:
    scheduler = stack.schedulers["tiny/0"]
    scheduler.reject = lambda submit: Rejected(
        submit.gateway, submit.chunk_id, code, "why", index=1, retry_after_ms=2500
    )
    async with stack.http.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "b"]}) as response:
        body = await response.json()
        assert (response.status, body["error"]["code"]) == (status, error_code)
        if status in (429, 503):
            assert response.headers["Retry-After"] == "3"
        if code in ("invalid", "quarantined", "non_finite", "out_of_memory"):
            assert body["error"]["param"] == "input[1]"
    request = {"model": "tiny", "query": "q", "documents": ["a", "b"]}
    status_found, body = await stack.post("/v1/rerank", request)
    assert status_found == status
    if code == "invalid":
        assert body["error"]["param"] == "documents[0]"  # sequence 0 is the query
    scheduler.reject = None
    check(await stack.embed())


async def test_full_here_may_have_room_there(make_stack: MakeStack) -> None:
    stack = await make_stack(num_replicas=2)
    stack.schedulers["tiny/0"].reject = "full"
    for _ in range(6):
        check(await stack.embed())
    stack.schedulers["tiny/1"].reject = "full"
    status, _ = await stack.embed()
    assert status == 429


async def test_one_failed_chunk_ends_the_request_and_aborts_the_others(make_stack: MakeStack) -> None:
    stack = await make_stack(max_chunk_tokens=8)
    scheduler = stack.schedulers["tiny/0"]
    scheduler.hold = True
    texts = [f"a tulip {i} is red" for i in range(5)]

    def refuse_the_last(submit: Submit) -> Rejected | None:
        if len(scheduler.submits) == 5:
            return Rejected(submit.gateway, submit.chunk_id, "non_finite", "NaN", index=0)
        return None

    scheduler.reject = refuse_the_last
    status, body = await stack.embed(texts)
    assert (status, body["error"]["param"]) == (422, "input[4]")
    await until(lambda: len(scheduler.aborts) == 4)
    assert {abort.chunk_id for abort in scheduler.aborts} == {submit.chunk_id for submit in scheduler.submits[:4]}
    assert not scheduler.held


async def test_an_answer_of_the_wrong_size_is_never_passed_on(stack: Stack) -> None:
    scheduler = stack.schedulers["tiny/0"]
    scheduler.hold = True
    answer = asyncio.create_task(stack.embed(["a", "b"]))
    await until(lambda: bool(scheduler.held))
    identity, submit, _ = scheduler.held.pop()
    result = Result(submit.gateway, submit.chunk_id, 1, 64, Timings(0, 0))
    scheduler.send_raw([identity, encode(result), b"\0" * 64])
    status, body = await answer
    assert (status, body["error"]["code"]) == (500, "internal_error")
    scheduler.hold = False
    check(await stack.embed())


async def test_messages_that_are_none_are_dropped(stack: Stack) -> None:
    scheduler = stack.schedulers["tiny/0"]
    (identity,) = scheduler.gateways
    for frames in ([b""], [b"\xff\xff"], [encode(Result(1, 2, 1, 64, Timings(0, 0))), b"x" * 64]):
        scheduler.send_raw([identity, *frames])
    check(await stack.embed())
    assert await stack.metric("bouquet_late_replies_total") == 3


async def test_quarantine_is_told_to_the_models_other_schedulers(make_stack: MakeStack, tiny_dir: Path) -> None:
    stack = await make_stack({"tiny": (tiny_dir, None), "other": (tiny_dir, None)}, num_replicas=3)
    message = Quarantine([b"fingerprint"], 60_000)
    stack.schedulers["tiny/0"].tell(message)
    await until(lambda: all(stack.schedulers[f"tiny/{i}"].quarantines == [message] for i in (1, 2)))
    assert not stack.schedulers["tiny/0"].quarantines
    assert not stack.schedulers["other/0"].quarantines


async def test_a_scheduler_reborn_is_told_the_quarantine_of_its_former_life(stack: Stack) -> None:
    old = stack.schedulers["tiny/0"]
    old.tell(Quarantine([b"for long"], 60_000))
    old.tell(Quarantine([b"for a moment"], 1))
    check(await stack.embed())  # comes after both
    old.close()
    new = stack.schedulers["tiny/0"] = FakeScheduler(old.endpoint)
    await until(lambda: bool(new.quarantines))
    check(await stack.embed())
    (message,) = new.quarantines
    assert message.fingerprints == [b"for long"]
    assert 0 < message.ttl_ms <= 60_000


async def test_replicas_come_and_go_without_a_lost_request(stack: Stack) -> None:
    stop = asyncio.Event()
    answers: list[tuple[int, Any]] = []

    async def load() -> None:
        while not stop.is_set():
            answers.append(await stack.embed())

    loads = [asyncio.create_task(load()) for _ in range(4)]
    added = await stack.add("tiny/1")
    await until(lambda: len(added.submits) > 10)
    old = stack.schedulers["tiny/0"]
    stack.draining.add("tiny/0")
    stack.write_replicas()
    await asyncio.sleep(0.5)
    seen = len(old.submits)
    await asyncio.sleep(0.2)
    assert len(old.submits) == seen  # nothing new for one that drains
    old.hold = True
    del stack.schedulers["tiny/0"]
    stack.write_replicas()
    await asyncio.sleep(0.5)
    old.close()
    await asyncio.sleep(0.2)
    stop.set()
    await asyncio.gather(*loads)
    assert len(answers) > 50
    for answer in answers:
        check(answer)


async def test_a_removed_replica_answers_what_it_has(make_stack: MakeStack) -> None:
    stack = await make_stack(num_replicas=2)
    first = stack.schedulers["tiny/0"]
    first.hold = stack.schedulers["tiny/1"].hold = True
    answers = [asyncio.create_task(stack.embed()) for _ in range(2)]
    await until(lambda: len(first.held) == 1)
    del stack.schedulers["tiny/0"]
    stack.write_replicas()
    await asyncio.sleep(0.8)
    first.release()
    stack.schedulers["tiny/1"].release()
    for answer in await asyncio.gather(*answers):
        check(answer)
    first.close()


async def test_a_gateway_that_was_dropped_and_taken_again_sends_its_work_anew(stack: Stack) -> None:
    scheduler = stack.schedulers["tiny/0"]
    scheduler.hold = True
    answer = asyncio.create_task(stack.embed())
    await until(lambda: bool(scheduler.held))
    scheduler.hold, scheduler.held = False, []  # it dropped the gateway, and its work with it
    scheduler.registration = 1
    scheduler.tell_status()
    check(await answer)
    assert [submit.attempt for submit in scheduler.submits] == [1, 2]


async def test_readiness_wants_a_recent_forward_pass(stack: Stack) -> None:
    scheduler = stack.schedulers["tiny/0"]
    for age, allowed, expected in ((100, 15_000, 200), (20_000, 15_000, 503), (-1, 15_000, 503), (20_000, 36_000, 200)):
        scheduler.forward_age_ms, scheduler.max_forward_age_ms = age, allowed
        scheduler.tell_status()
        await asyncio.sleep(0.05)
        assert await stack.ready() == expected
    async with stack.http.get("/health/live") as response:
        assert response.status == 200
    scheduler.close()
    await asyncio.sleep(0.1)
    async with stack.http.get("/health/ready") as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert "tiny/0 is not reached" in (await response.json())["error"]["message"]
    async with stack.http.get("/health/live") as response:
        assert response.status == 200
    del stack.schedulers["tiny/0"]


async def test_an_unreadable_replicas_file_changes_nothing(stack: Stack) -> None:
    path = stack.run_dir / "replicas.json"
    path.write_text("{half")
    await until(lambda: any(event == "replicas_file_unreadable" for event, _ in stack.events))
    check(await stack.embed())
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    await asyncio.sleep(0.3)
    check(await stack.embed())
