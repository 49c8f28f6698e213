"""A Generation by itself: what it keeps, what begins anew, what ends it."""

import asyncio

import pytest

from gateway.errors import GatewayError, InternalError, NotReady, SlowRequest
from gateway.generate_job import MAX_TAKEN, ChoiceInput, Generation, Keeping
from gateway.job import AbortReason, Chunk
from ipc.submit import TokenDelta
from ipc.types import SamplingParams, Timings


class Carrier:
    def __init__(self) -> None:
        self.aborted: list[tuple[Chunk, AbortReason]] = []

    def abort(self, chunk: Chunk, reason: AbortReason) -> None:
        chunk.carrier = None
        self.aborted.append((chunk, reason))


def make(num_choices: int = 2, *, max_tokens: int = 100, streams: bool = True) -> tuple[Generation, Carrier]:
    choices = [ChoiceInput(0, b"\0\0\0\0", 1, SamplingParams(logprobs=1)) for _ in range(num_choices)]
    generation = Generation(choices, "interactive", 1e9, Keeping(max_tokens, streams), lambda chunk: None)
    carrier = Carrier()
    for chunk in generation.chunks:
        chunk.carrier = carrier
    return generation, carrier


def delta(*tokens: int, end: bool = False) -> TokenDelta:
    return TokenDelta(1, list(tokens), finish_reason="length" if end else None)


async def test_news_are_taken_once_and_in_order() -> None:
    generation, _ = make()
    first, second = generation.chunks
    generation.tokens(first, delta(1))
    generation.tokens(second, delta(2))
    generation.tokens(first, delta(3))
    news = await generation.news()
    assert {i: [d.tokens for d in item.deltas] for i, item in news.items()} == {0: [[1], [3]], 1: [[2]]}
    waiting = asyncio.create_task(generation.news())
    await asyncio.sleep(0)
    assert not waiting.done()
    generation.wake()
    assert await waiting == {}


async def test_much_at_once_is_taken_in_parts_and_others_get_their_turns() -> None:
    """Two choices of 2000 tokens with a logprob each; one is lost, the other ended, when a part of them was taken."""
    generation, _ = make(4, max_tokens=20_000)
    for token in range(2000):
        for chunk in generation.chunks:
            generation.tokens(chunk, delta(token))
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    found: dict[int, list[int]] = {i: [] for i in range(4)}
    num_parts = 0
    while any(len(tokens) < 2000 for i, tokens in found.items() if i > 1):
        news = await generation.news()
        weight = sum(2 * len(item.deltas) for item in news.values())
        assert 0 < weight <= MAX_TAKEN + 2
        for i, item in news.items():
            found[i] += [token for each in item.deltas for token in each.tokens]
        num_parts += 1
        if num_parts == 2:
            generation.end(1)
            assert generation.may_restart(generation.chunks[0])
    task.cancel()
    assert num_parts >= 2 * 4000 // MAX_TAKEN
    assert num_turns >= num_parts - 1
    assert found[2] == found[3] == list(range(2000))
    assert len(found[0]) == len(found[1]) == MAX_TAKEN // 2
    for chunk in generation.chunks[2:]:
        generation.tokens(chunk, delta(*range(5000)))  # 20,000 in all: nothing is kept any more
    assert list(await generation.news()) == [2]


async def test_a_lost_choice_forgets_what_is_not_taken() -> None:
    generation, _ = make()
    first, _ = generation.chunks
    generation.tokens(first, delta(1))
    await generation.news()
    assert not generation.will_restart(0)
    assert generation.may_restart(first)
    assert generation.will_restart(0)
    generation.tokens(first, delta(4))
    news = await generation.news()
    assert (news[0].restarted, [d.tokens for d in news[0].deltas]) == (True, [[4]])


async def test_a_streamed_choice_that_is_lost_ends_all() -> None:
    generation, carrier = make()
    first, second = generation.chunks
    generation.streamed.add(0)
    first.carrier = None
    assert not generation.may_restart(first)
    assert carrier.aborted == [(second, "stop")]
    assert not generation.may_restart(second)  # it is over
    with pytest.raises(NotReady):
        await generation.news()


async def test_what_is_kept_is_bounded() -> None:
    for streams, error in ((True, SlowRequest), (False, GatewayError)):
        generation, carrier = make(1, max_tokens=20, streams=streams)
        for _ in range(5):
            generation.tokens(generation.chunks[0], delta(1, 2))  # each with a logprob: four
        await generation.news()
        generation.tokens(generation.chunks[0], delta(1))
        if streams:
            assert 0 in await generation.news()
            generation.tokens(generation.chunks[0], delta(*range(11)))
        with pytest.raises(error):
            await generation.news()
        assert len(carrier.aborted) == 1


@pytest.mark.parametrize("streams", [True, False])
async def test_what_a_lost_choice_had_counts_no_more(streams: bool) -> None:
    generation, carrier = make(2, max_tokens=40, streams=streams)
    first, second = generation.chunks
    generation.tokens(second, delta(1))
    for _ in range(5):
        generation.tokens(first, delta(*range(8)))  # each with a logprob: sixteen
        await generation.news()
        generation.tokens(first, delta(1))
        assert generation.may_restart(first)
    generation.tokens(first, delta(*range(18)))  # 36, and the second has two
    assert not carrier.aborted
    generation.tokens(first, delta(1, 2, 3))
    with pytest.raises(GatewayError):
        await generation.news()


async def test_answers_of_another_kind_are_an_error_of_ours() -> None:
    generation, carrier = make()
    generation.succeeded(generation.chunks[0], b"", 4, Timings(0, 0))
    with pytest.raises(InternalError):
        await generation.news()
    assert len(carrier.aborted) == 2
    generation, _ = make()
    generation.tokens(generation.chunks[0], TokenDelta(1, [], finish_reason="abort"))
    with pytest.raises(InternalError):
        await generation.news()
