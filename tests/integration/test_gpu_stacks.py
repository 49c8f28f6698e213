"""Two GPUs behind one stack: a model divided between them, which survives its ranks; replicas, which share the work.

Real processes, started as `bouquet up` starts them. What it takes a group to go is printed: run with -s to see it.
"""

import asyncio
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator

import aiohttp
import numpy as np
import pytest
import torch

from rose.config import RankConfig
from rose.offline import OfflineEncoder
from services.render import replica_file
from tests.integration.stack import Stack, alive
from tests.integration.streams import Told, generate
from tests.rose.distributed.ranks import SHARED_SUMS
from tests.rose.random_models import bert
from tests.rose.tiny_lm import write_llama, write_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LLAMA, BERT = "tiny-llama", "tiny-bert"
RANKS = [f"{LLAMA}-0:rank-{rank}" for rank in range(2)]
PROMPTS = [[50 + i, 120, 7 * i + 3] for i in range(3)]
LONG = 200  # tokens
GONE_SECONDS = 10.0
REPLICAS_SECONDS = 60.0
ROWS_SECONDS = 30.0
CONTEXT_BYTES = 100 << 20  # a process takes more than that of a GPU
RANK = {
    "device": "cuda", "dtype": "float32", "memory_fraction": 0.3, "kv_cache_bytes": 1 << 24, "shared_sums": SHARED_SUMS
}  # fmt: skip


class GpuStack(Stack):
    """The first start of all compiles its kernels."""

    def wait_ready(self, seconds: float = 150.0) -> float:
        return super().wait_ready(seconds)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = write_llama(tmp_path_factory.mktemp("models") / LLAMA, tokenizer=True)
    with GpuStack(tmp_path_factory.mktemp("bq"), {LLAMA: directory}, tensor_parallel_size=2, rank=RANK) as made:
        yield made


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=100)) as opened:
        yield opened


async def streams(stack: Stack, session: aiohttp.ClientSession, begun: asyncio.Event | None = None) -> list[Told]:
    """One of each prompt, to their ends; `begun` is set once something has been said."""

    def on_event(told: Told) -> None:
        if begun is not None and told.num_events == 5:
            begun.set()

    made = [generate(session, stack.url, LLAMA, prompt, LONG, on_event=on_event) for prompt in PROMPTS]
    return await asyncio.gather(*made)


async def gone(pids: list[int]) -> float:
    """Seconds until none of the processes lives."""
    started = time.monotonic()
    async with asyncio.timeout(GONE_SECONDS):
        while any(map(alive, pids)):
            await asyncio.sleep(0.02)
    return time.monotonic() - started


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)], ids=["killed", "halted"])
async def test_both_go_and_come_back(
    group: Stack, session: aiohttp.ClientSession, rank: int, number: signal.Signals
) -> None:
    """While graphs with collectives in them run; what was under way is answered as if nothing had happened."""
    expected = await streams(group, session)
    assert all(told.error is None and told.num_tokens == LONG for told in expected)
    begun = asyncio.Event()
    under_way = asyncio.create_task(streams(group, session, begun))
    await begun.wait()
    pids = [group.pid(name) for name in RANKS]
    os.kill(pids[rank], number)
    started = time.monotonic()
    seconds = await gone(pids)
    found = await under_way
    print(f"rank {rank}, {number.name}: both gone in {seconds:.2f} s, answered in {time.monotonic() - started:.1f} s")
    for told, other in zip(found, expected, strict=True):
        assert told.error is None
        assert (told.text, told.num_tokens) == (other.text, LONG)
    assert not {group.pid(name) for name in RANKS} & set(pids)


async def test_an_ordered_restart_of_one_rank(group: Stack, session: aiohttp.ClientSession) -> None:
    expected = await streams(group, session)
    begun = asyncio.Event()
    under_way = asyncio.create_task(streams(group, session, begun))
    await begun.wait()
    pids = [group.pid(name) for name in RANKS]
    await asyncio.to_thread(group.restart_program, RANKS[1])
    for told, other in zip(await under_way, expected, strict=True):
        assert (told.error, told.text) == (None, other.text)
    assert not {group.pid(name) for name in RANKS} & set(pids)


def test_replicas_on_two_gpus_share_the_work(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One line of the configuration, `replicas = 2`: each has a GPU of its own, and both are asked."""
    directory = bert(tmp_path_factory.mktemp("models") / BERT, vocab_size=320)
    write_tokenizer(directory)
    one = OfflineEncoder(directory, RankConfig(device="cpu", num_threads=1))
    rows = [list(range(5 + i, 40 + 5 * i)) for i in range(16)]
    expected = one.encode(rows)
    one.close()
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
    with GpuStack(tmp_path_factory.mktemp("bq"), {BERT: directory}, replicas=2, rank=RANK) as stack:
        programs = [replica_file(stack.run_dir, f"{BERT}/{replica}").read_text() for replica in range(2)]
        assert len({re.findall('CUDA_VISIBLE_DEVICES="([^"]+)"', text)[0] for text in programs}) == 2
        wait_for_replicas(stack, 2)
        before = num_rows(stack)
        for _ in range(3):
            np.testing.assert_allclose(at_once(stack, rows), expected, atol=1e-4)
        answered = wait_for_rows(stack, before, 3 * len(rows))
        for gpu in range(2):
            assert torch.cuda.mem_get_info(gpu)[0] < free[gpu] - CONTEXT_BYTES
    print(f"rows that each replica answered: {answered}")
    assert len(answered) == 2
    assert min(answered.values()) >= len(rows) / 2  # of three times as many


def wait_for_replicas(stack: Stack, number: int) -> None:
    """Until so many ranks tell of themselves, as they do once they have loaded; a stack answers as soon as one has."""
    end = time.monotonic() + REPLICAS_SECONDS
    while len(found := of_replicas(stack, "bouquet_rank_tokens_total")) < number:
        assert time.monotonic() < end, f"after {REPLICAS_SECONDS:g} s replicas {sorted(found)} alone have loaded"
        time.sleep(0.2)


def wait_for_rows(stack: Stack, before: dict[str, float], number: int) -> dict[str, float]:
    """What each replica has answered since, once so many rows are counted: schedulers tell from time to time."""
    end = time.monotonic() + ROWS_SECONDS
    while True:
        answered = {replica: rows - before.get(replica, 0.0) for replica, rows in num_rows(stack).items()}
        if sum(answered.values()) >= number or time.monotonic() > end:
            return answered
        time.sleep(0.2)


def num_rows(stack: Stack) -> dict[str, float]:
    """What each replica has answered so far."""
    return of_replicas(stack, "bouquet_scheduler_rows_total")


def of_replicas(stack: Stack, name: str) -> dict[str, float]:
    """A sample of /metrics by the replica that it is of."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=10) as response:
        metrics = response.read().decode()
    sample = rf'^{name}\{{[^}}]*replica="([^"]+)"[^}}]*\}} (\S+)$'
    return {found[1]: float(found[2]) for found in re.finditer(sample, metrics, re.M)}


def at_once(stack: Stack, rows: list[list[int]]) -> list[list[float]]:
    """The vector of each row, all asked for at the same time, one request each."""

    async def ask() -> list[list[float]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            return await asyncio.gather(*(vector(session, row) for row in rows))

    async def vector(session: aiohttp.ClientSession, row: list[int]) -> list[float]:
        body = {"model": BERT, "input": row, "encoding_format": "float"}
        async with session.post(f"{stack.url}/v1/embeddings", json=body) as response:
            assert response.status == 200, await response.text()
            found: list[float] = json.loads(await response.read())["data"][0]["embedding"]
            return found

    return asyncio.run(ask())
