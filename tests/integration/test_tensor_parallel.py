"""Replicas of two ranks on one stack: their answers, and what becomes of them when one dies, halts, leaves or errs.

Real processes over gloo; every stream and vector is checked against what one rank says.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from rose.config import RankConfig
from rose.offline import OfflineEncoder
from services.render import replica_file
from tests.goldens import read_goldens
from tests.integration.stack import Stack, alive, with_project
from tests.integration.streams import Told, generate
from tests.rose.random_models import bert
from tests.rose.tiny_lm import write_llama, write_tokenizer

LLAMA, BERT = "tiny-llama", "tiny-bert"
RANKS = [f"{LLAMA}-0:rank-{rank}" for rank in range(2)]
PROMPTS = [[50 + i, 120, 7 * i + 3] for i in range(3)]
LONG = 150  # tokens
FORGET_ON = 301  # the first prompt with this id makes rank 1 lose a token
BACK_SECONDS = 10.0


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    write_tokenizer(bert(root / BERT, num_layers=1, vocab_size=320))
    return {LLAMA: write_llama(root / LLAMA, tokenizer=True), BERT: root / BERT}


class TwoRanks(Stack):
    """Rank 1 of the language model is a forgetful one."""

    def prepare(self) -> None:
        file = replica_file(self.run_dir, f"{LLAMA}/0")
        text, count = re.subn(
            r"-m services\.rose_main (.*--rank=1)$",
            rf"-m tests.fakes.diverging_rank --forget-on {FORGET_ON} --once {self.run_dir}/forgotten \1",
            file.read_text(),
            flags=re.M,
        )
        assert count == 1
        file.write_text(with_project(text))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, directories: dict[str, Path]) -> Iterator[Stack]:
    with TwoRanks(tmp_path_factory.mktemp("bq"), directories, tensor_parallel_size=2) as made:
        yield made


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as opened:
        yield opened


async def undisturbed(stack: Stack, session: aiohttp.ClientSession) -> list[Told]:
    found = await asyncio.gather(*(generate(session, stack.url, LLAMA, prompt, LONG) for prompt in PROMPTS))
    assert all(told.error is None and told.num_tokens == LONG for told in found)
    return found


async def under_way(stack: Stack, session: aiohttp.ClientSession, **fields: object) -> list[asyncio.Task[Told]]:
    """Streams of all prompts, once the first have said something."""
    streaming = asyncio.Event()

    def on_event(told: Told) -> None:
        if told.num_events == 5:
            streaming.set()

    tasks = [
        asyncio.create_task(generate(session, stack.url, LLAMA, prompt, LONG, on_event=on_event, **fields))
        for prompt in PROMPTS
    ]
    await streaming.wait()
    return tasks


async def gone(pids: list[int]) -> float:
    """Seconds until none of the processes lives; at most BACK_SECONDS."""
    started = time.monotonic()
    async with asyncio.timeout(BACK_SECONDS):
        while any(map(alive, pids)):
            await asyncio.sleep(0.02)
    return time.monotonic() - started


def check(tasks: list[Told], expected: list[Told]) -> None:
    for told, other in zip(tasks, expected, strict=True):
        assert told.error is None
        assert told.text == other.text
        assert told.logprobs == pytest.approx(other.logprobs, abs=2e-3)
        assert (told.finish_reason, told.num_tokens) == ("length", LONG)


async def test_completions_and_vectors_are_those_of_one_rank(
    stack: Stack, session: aiohttp.ClientSession, directories: dict[str, Path]
) -> None:
    for golden in read_goldens("tiny_llama")[:4]:
        told = await generate(session, stack.url, LLAMA, golden.prompt_ids, len(golden.tokens))
        assert told.error is None
        assert told.logprobs == pytest.approx(golden.logprobs, abs=2e-3), golden.name
    rows = [[5, 6, 7], list(range(10, 60))]
    one = OfflineEncoder(directories[BERT], RankConfig(device="cpu", num_threads=1))
    expected = one.encode(rows)
    one.close()
    np.testing.assert_allclose(await asyncio.to_thread(stack.embed, BERT, rows), expected, atol=1e-5)


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
async def test_both_go_and_come_back_when_one_dies_or_halts(
    stack: Stack, session: aiohttp.ClientSession, rank: int, number: signal.Signals
) -> None:
    expected = await undisturbed(stack, session)
    tasks = await under_way(stack, session)
    pids = [stack.pid(name) for name in RANKS]
    os.kill(pids[rank], number)
    assert await gone(pids) < BACK_SECONDS
    check(await asyncio.gather(*tasks), expected)
    assert not {stack.pid(name) for name in RANKS} & set(pids)


async def test_a_rank_that_diverges_is_caught(stack: Stack, session: aiohttp.ClientSession) -> None:
    """Its token is in no answer: both ranks go, and what was under way is computed again."""
    expected = await undisturbed(stack, session)
    tasks = await under_way(stack, session)
    pids = [stack.pid(name) for name in RANKS]
    told = await generate(session, stack.url, LLAMA, [FORGET_ON, 9, 8], 20)
    assert not any(map(alive, pids))
    faults = [event for rank in RANKS for event in stack.events(rank.replace(":", "-")) if "error" in event]
    assert any("Diverged" in event["error"] and "slots' lengths" in event["error"] for event in faults), faults
    check(await asyncio.gather(*tasks), expected)
    again = await generate(session, stack.url, LLAMA, [FORGET_ON, 9, 8], 20)
    assert (told.error, told.text) == (None, again.text)


async def test_an_ordered_restart_of_one_rank_breaks_no_stream(stack: Stack, session: aiohttp.ClientSession) -> None:
    expected = await undisturbed(stack, session)
    tasks = await under_way(stack, session)
    pids = [stack.pid(name) for name in RANKS]
    await asyncio.to_thread(stack.restart_program, RANKS[1])
    check(await asyncio.gather(*tasks), expected)
    assert not {stack.pid(name) for name in RANKS} & set(pids)
