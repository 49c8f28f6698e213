"""Streams of tokens from two small language models on one stack: real processes that die, restart and are left.

Every stream is checked against what it must say, so that a wrong token cannot hide.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from tests.goldens import GoldenPrompt, read_goldens
from tests.integration.stack import Stack
from tests.integration.streams import Told, generate, wait_for_metric
from tests.rose.tiny_lm import write_llama, write_qwen3

LLAMA, QWEN3 = "tiny-llama", "tiny-qwen3"
MODELS = (LLAMA, QWEN3)
RANK, SCHEDULER = f"{LLAMA}-0:rank-0", f"{LLAMA}-0:scheduler"
PROMPTS = [[50 + i, 120, 7 * i + 3] for i in range(4)]
LONG = 200  # tokens


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {LLAMA: write_llama(root / LLAMA, tokenizer=True), QWEN3: write_qwen3(root / QWEN3, tokenizer=True)}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, directories: dict[str, Path]) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("bq"), directories) as made:
        yield made


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as opened:
        yield opened


def check(told: Told, golden: GoldenPrompt, tokenizer: Tokenizer) -> None:
    assert told.error is None
    assert told.logprobs == pytest.approx(golden.logprobs, abs=2e-3), golden.name
    assert told.text == tokenizer.decode(golden.tokens, skip_special_tokens=True), golden.name
    assert (told.finish_reason, told.num_tokens) == ("length", len(golden.tokens))


async def test_two_models_side_by_side_say_what_transformers_says(
    stack: Stack, session: aiohttp.ClientSession, directories: dict[str, Path]
) -> None:
    """All at once; then half of them again, whose prompts the prefix cache knows."""
    goldens = [(model, golden) for model in MODELS for golden in read_goldens(model.replace("-", "_"))]  # type: ignore[arg-type]
    tokenizers = {model: Tokenizer.from_file(str(directories[model] / "tokenizer.json")) for model in MODELS}

    async def ask(model: str, golden: GoldenPrompt) -> None:
        check(await generate(session, stack.url, model, golden.prompt_ids, 64), golden, tokenizers[model])

    await asyncio.gather(*(ask(model, golden) for model, golden in goldens))
    await asyncio.gather(*(ask(model, golden) for model, golden in goldens[::2]))


async def undisturbed(stack: Stack, session: aiohttp.ClientSession, num_tokens: int) -> list[Told]:
    """What the prompts' streams are when nothing happens."""
    asked = (generate(session, stack.url, LLAMA, prompt, num_tokens) for prompt in PROMPTS)
    found = await asyncio.gather(*asked)
    assert all(told.error is None and told.num_tokens == num_tokens for told in found)
    assert len({told.text for told in found}) == len(PROMPTS)
    return found


@pytest.mark.parametrize("prefix", ["cached", "new"])
async def test_streams_go_on_when_their_rank_is_killed(
    stack: Stack, session: aiohttp.ClientSession, prefix: str
) -> None:
    """The same tokens with the same log probabilities, none twice and none left out."""
    expected = await undisturbed(stack, session, LONG)
    salt = {} if prefix == "cached" else {"cache_salt": "of its own"}
    streaming = asyncio.Event()

    def on_event(told: Told) -> None:
        if told.num_events == 10:
            streaming.set()

    tasks = [
        asyncio.create_task(generate(session, stack.url, LLAMA, prompt, LONG, on_event=on_event, **salt))
        for prompt in PROMPTS
    ]
    await streaming.wait()
    stack.kill(RANK)
    assert not any(task.done() for task in tasks)
    told = await asyncio.gather(*tasks)
    for one, other in zip(told, expected, strict=True):
        assert one.error is None
        assert one.text == other.text
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-3)
        assert (one.finish_reason, one.num_tokens) == ("length", LONG)


async def test_a_stream_whose_scheduler_dies_ends_with_an_error_and_the_next_one_is_whole(
    stack: Stack, session: aiohttp.ClientSession
) -> None:
    expected = await generate(session, stack.url, LLAMA, PROMPTS[0], LONG)
    streaming = asyncio.Event()
    task = asyncio.create_task(
        generate(session, stack.url, LLAMA, PROMPTS[0], LONG, on_event=lambda told: streaming.set())
    )
    await streaming.wait()
    stack.kill(SCHEDULER)
    told = await task
    assert told.error is not None
    assert told.finish_reason is None
    assert expected.text.startswith(told.text)
    again = await generate(session, stack.url, LLAMA, PROMPTS[0], LONG)  # waits for the new scheduler
    assert (again.text, again.error) == (expected.text, None)


async def test_clients_that_leave_free_their_slots_and_blocks(stack: Stack, session: aiohttp.ClientSession) -> None:
    started = asyncio.Event()

    async def ask(number: int) -> None:
        await generate(session, stack.url, LLAMA, [9, 8, number], LONG, on_event=lambda told: started.set())

    async def wait_for(name: str, wanted: Callable[[float], bool]) -> float:
        return await wait_for_metric(session, stack.url, name, LLAMA, wanted)

    before = await wait_for("generated_tokens_total", lambda value: value >= 0)
    tasks = [asyncio.create_task(ask(number)) for number in range(12)]
    await started.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await wait_for("generated_tokens_total", lambda value: value > before)
    for name in ("running_sequences", "waiting_sequences", "pending_requests", "blocks_used"):
        await wait_for(name, lambda value: value == 0)
    assert await wait_for("generated_tokens_total", lambda value: value > before) < before + 12 * LONG / 2


async def test_a_restart_under_load_breaks_no_stream(stack: Stack, session: aiohttp.ClientSession) -> None:
    expected = {told.text for told in await undisturbed(stack, session, 64)}
    stop, whole = asyncio.Event(), 0
    broken: list[Told] = []

    async def ask(prompt: list[int]) -> None:
        nonlocal whole
        while not stop.is_set():
            told = await generate(session, stack.url, LLAMA, prompt, 64)
            if told.error is None and told.text in expected:
                whole += 1
            else:
                broken.append(told)

    tasks = [asyncio.create_task(ask(prompt)) for prompt in PROMPTS[:3]]
    pid = stack.pid(RANK)
    done = await asyncio.to_thread(stack.cli, "restart", LLAMA)
    assert done.returncode == 0, done.stderr
    before = whole
    async with asyncio.timeout(20):
        while whole < before + 6:
            await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*tasks)
    assert stack.pid(RANK) != pid
    assert not broken, broken[0]
