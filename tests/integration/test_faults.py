"""What a stack does when its processes die, hang or are fed poison: real processes, fake model.

Every answer under load is checked against what it must be, so that a wrong one cannot hide.
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.conftest import fake_vector
from tests.integration.load import Load
from tests.integration.stack import Stack, alive, descendants, num_descriptors

MODEL = "all-minilm-l6-v2"
SCHEDULER, RANK = f"{MODEL}-0:scheduler", f"{MODEL}-0:rank-0"
POISON, NAN, HANG = 30001, 30002, 30003
ANSWERED_LATER = {429, 503}  # refusals that a client may repeat


@pytest.fixture
def stack(run_dir: Path, minilm_dir: Path) -> Iterator[Stack]:
    options = ["--die-on", str(POISON), "--nan-on", str(NAN), "--hang-on", str(HANG), "--latency-ms", "2"]
    with Stack(
        run_dir, {MODEL: minilm_dir}, fake_rank=options, num_gateways=2, scheduler={"step_deadline_ms": 1500}
    ) as made:
        yield made


def load(stack: Stack) -> Load:
    return Load(stack.url, MODEL, fake_vector)


async def embed(stack: Stack, rows: list[list[int]], timeout_ms: int | None = None) -> tuple[int, dict]:
    headers = {} if timeout_ms is None else {"X-Timeout-Ms": str(timeout_ms)}
    body = {"model": MODEL, "input": rows, "encoding_format": "float"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/embeddings", json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize("victim", [RANK, SCHEDULER, "gateways:gateway-0"])
async def test_kill_under_load(stack: Stack, victim: str) -> None:
    async with load(stack) as running:
        await running.answered(100)
        stack.kill(victim)
        await running.answered(300)
    outcome = running.outcome
    assert outcome.num_wrong == 0
    assert set(outcome.statuses) <= ANSWERED_LATER, outcome
    assert outcome.slowest < 20
    if victim == RANK:  # its work is done again; nobody sees it
        assert outcome.num_failed == 0, outcome


async def test_nothing_is_left_behind_by_repeated_kills(stack: Stack) -> None:
    survivors = {"gateways:gateway-0", "gateways:gateway-1", SCHEDULER}

    def counts() -> dict[str, int]:
        return {name: num_descriptors(stack.pid(name)) for name in survivors}

    async with load(stack) as running:
        await running.answered(50)
        stack.kill(RANK)
        await running.answered(200)
    stack.wait_ready()
    before = counts()
    sockets = sorted(str(path) for path in (stack.run_dir / "replicas").rglob("*"))
    for _ in range(3):
        async with load(stack) as running:
            await running.answered(50)
            stack.kill(RANK)
            await running.answered(200)
        stack.wait_ready()
    await asyncio.sleep(1)
    after = counts()
    assert all(after[name] <= before[name] + 1 for name in survivors), (before, after)
    assert sorted(str(path) for path in (stack.run_dir / "replicas").rglob("*")) == sockets


async def test_a_hanging_rank_is_replaced(stack: Stack) -> None:
    async with load(stack) as running:
        await running.answered(100)
        pid = stack.kill(RANK, signal.SIGSTOP)
        await running.answered(300)
    assert running.outcome.num_wrong == 0
    assert running.outcome.num_failed == 0, running.outcome
    assert not alive(pid)


HALTS_ONCE = """
import os, signal, sys
from pathlib import Path
if not (mark := Path(sys.argv[1])).exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
os.execv(sys.executable, [sys.executable, "-m", "tests.fakes.rank", *sys.argv[2:]])
"""


class HaltsOnce(Stack):
    """The first life of every rank is halted before its Hello."""

    def _fake_ranks(self, file: Path) -> None:
        super()._fake_ranks(file)
        script = self.run_dir / "halts_once.py"
        script.write_text(HALTS_ONCE)
        instead = f" {script} {self.run_dir / 'halted'} "
        file.write_text(file.read_text().replace(" -m tests.fakes.rank ", instead))


async def test_a_rank_that_is_halted_before_its_hello_is_replaced(run_dir: Path, minilm_dir: Path) -> None:
    with HaltsOnce(run_dir, {MODEL: minilm_dir}, fake_rank=[], scheduler={"hello_deadline_ms": 4000}) as stack:
        told = next(event for event in stack.events(f"{MODEL}-0-scheduler") if event["event"] == "rank_ended")
        assert told["program"] == f"{MODEL}-0-rank-0"
        assert "hello_deadline_ms" in told["reason"]
        assert not alive(told["pid"])


async def test_poison_is_quarantined_and_its_neighbours_are_not(stack: Stack) -> None:
    async with load(stack) as running:
        await running.answered(100)
        status, body = await embed(stack, [[7, 8], [9, POISON]])
        assert (status, body["error"]["code"]) == (422, "request_quarantined"), body
        await running.answered(100)  # by the rank that has come back: gateways may not yet know that it was away
        pid = stack.pid(RANK)
        status, _ = await embed(stack, [[9, POISON]])
        assert status == 422
        assert stack.pid(RANK) == pid  # refused at the door
        await running.answered(100)
    assert running.outcome.num_wrong == 0
    assert running.outcome.num_failed == 0, running.outcome


async def test_one_kill_with_one_request_in_flight_is_answered(run_dir: Path, minilm_dir: Path) -> None:
    with Stack(run_dir, {MODEL: minilm_dir}, fake_rank=["--latency-ms", "800"]) as stack:
        async with Load(stack.url, MODEL, fake_vector, num_workers=1) as running:
            await asyncio.sleep(0.4)  # the first request is on the rank now
            assert running.outcome.num_right == 0
            stack.kill(RANK)
            await running.answered(2)
        assert running.outcome.num_failed == 0, running.outcome
        assert running.outcome.num_wrong == 0


async def test_a_row_that_gives_nan_fails_alone(stack: Stack) -> None:
    async with load(stack) as running:
        for _ in range(5):
            status, body = await embed(stack, [[7, 8], [9, NAN]])
            assert status == 422
            assert body["error"]["code"] == "non_finite_output"
            assert "1" in body["error"]["message"]
        await running.answered(50)
    assert running.outcome.num_wrong == 0
    assert running.outcome.num_failed == 0, running.outcome


async def test_deadline_is_kept_while_a_step_hangs(stack: Stack) -> None:
    started = time.monotonic()
    status, body = await embed(stack, [[5, HANG]], timeout_ms=500)
    assert status == 504, body
    assert time.monotonic() - started < 1.5
    status, _ = await embed(stack, [[5, 6]])
    assert status == 200


@pytest.mark.parametrize("program", [RANK, SCHEDULER, "gateways:gateway-0"])
async def test_restart_of_one_program(stack: Stack, program: str) -> None:
    async with load(stack) as running:
        await running.answered(100)
        await asyncio.to_thread(stack.restart_program, program)
        await running.answered(300)
    outcome = running.outcome
    assert outcome.num_wrong == 0
    assert set(outcome.statuses) <= ANSWERED_LATER, outcome
    assert outcome.num_failed == 0, outcome


async def test_killed_supervisord_leaves_no_orphan_and_the_next_start_is_clean(run_dir: Path, minilm_dir: Path) -> None:
    stack = Stack(run_dir, {MODEL: minilm_dir}, fake_rank=[], num_gateways=2)
    stack.start()
    family = descendants(stack.supervisord_pid)
    assert len(family) == 4
    stack.kill_supervisord()
    deadline = time.monotonic() + 5
    while any(map(alive, family)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not [pid for pid in family if alive(pid)]
    with stack:
        async with load(stack) as running:
            await running.answered(50)
        assert running.outcome.num_failed == 0
    assert not list((run_dir / "replicas").rglob("*.sock"))


async def test_a_full_pool_is_a_quick_429(run_dir: Path, minilm_dir: Path) -> None:
    scheduler = {"max_pending_requests": 4}
    with Stack(run_dir, {MODEL: minilm_dir}, fake_rank=["--latency-ms", "100"], scheduler=scheduler) as stack:
        async with Load(stack.url, MODEL, fake_vector, num_workers=64) as running:
            await running.answered(50)
        outcome = running.outcome
    assert outcome.num_wrong == 0
    assert set(outcome.statuses) == {429}, outcome
    assert not outcome.errors
