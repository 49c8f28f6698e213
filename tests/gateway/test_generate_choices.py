"""Choices by themselves: what a client gets to see of one that is lost while another is made ready."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.call import Call
from gateway.generate_choices import INLINE_ENTRIES, Choices
from gateway.generate_prompt import Prompt
from gateway.metrics import Metrics
from gateway.models import load_model
from gateway.tasks import GenerateTask
from ipc.types import SamplingParams
from tests.gateway.fake_scheduler import chat_facts
from tests.gateway.test_generate_job import delta, make


@pytest.fixture
def call(chat_dir: Path) -> Iterator[Call]:
    with ThreadPoolExecutor(1) as pool:
        gateway = SimpleNamespace(metrics=Metrics(), pool=pool)
        yield Call(gateway, load_model("chat", chat_dir), chat_facts(), "interactive", 1e9)  # type: ignore[arg-type]


async def test_what_is_lost_while_others_are_made_ready_is_not_shown(call: Call) -> None:
    """Of a stream: what is shown cannot begin anew."""
    task = GenerateTask("chat", [[3, 4]], SamplingParams(), n=2, stream=True)
    generation, _ = make(2, max_tokens=10 * INLINE_ENTRIES)
    choices = Choices(call, task, [Prompt([3, 4])], generation)
    lost, large = generation.chunks
    generation.tokens(lost, delta(5))
    generation.tokens(large, delta(*[6] * (INLINE_ENTRIES + 1)))
    asyncio.get_running_loop().call_soon(generation.may_restart, lost)  # runs when the pool is waited for
    assert [piece.choice for piece in await choices.next()] == [1]
    generation.tokens(lost, delta(7, 8, end=True))
    (piece,) = await choices.next()
    assert (piece.choice, piece.first, piece.finish_reason) == (0, True, "length")
    assert choices.usage().num_tokens == INLINE_ENTRIES + 3
