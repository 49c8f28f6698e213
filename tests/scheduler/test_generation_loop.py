"""Generation through loop and links: real sockets, a real ring, fake ranks in processes of their own."""

import asyncio
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from ipc.step_ring import Arrays
from ipc.submit import Rejected
from ipc.types import SamplingParams
from scheduler.llm.answers import check_answer
from scheduler.llm.residents import Residents
from scheduler.llm.tables import Step
from tests.fakes.rank import fake_facts
from tests.fakes.stateful_rank import reference
from tests.scheduler.stack import HandGateway, Stack, stack

FACTS = {"task": "generate"}
MODEL = fake_facts(**FACTS)
DIE = 6001


def prompts(count: int) -> Iterator[tuple[int, list[int], SamplingParams]]:
    for chunk in range(count):
        params = SamplingParams(max_tokens=10 + chunk % 7, seed=chunk, ignore_eos=True)
        yield chunk, list(range(chunk + 1, chunk + 40)), params


async def ready(made: Stack, **config: object) -> HandGateway:
    made.scheduler(**config)
    gateway = made.gateway()
    await gateway.ready()
    return gateway


async def test_generations_of_two_gateways_share_steps() -> None:
    async with stack() as made:
        made.rank(facts=FACTS)
        first = await ready(made)
        second = made.gateway()
        await second.ready()
        for chunk, prompt, params in prompts(20):
            await first.submit(chunk, [prompt], sampling=params)
            await second.submit(chunk, [prompt[::-1]], sampling=params)
        for chunk, prompt, params in prompts(20):
            assert await first.generated(chunk) == reference(prompt, params, MODEL)
            assert await second.generated(chunk) == reference(prompt[::-1], params, MODEL)
        stats = made.schedulers[0].stats
        assert stats.num_steps < 200  # of 40 generations of 13 tokens
        assert stats.pending_requests == 0
        samples = stats.samples(1, 0.0).values
        assert samples['bouquet_scheduler_generated_tokens_total{replica="fake/0"}'] == sum(
            2 * params.max_tokens for _, _, params in prompts(20)
        )
        assert samples['bouquet_scheduler_blocks_used{replica="fake/0"}'] == 0


async def test_tokens_stream_and_an_abort_ends_them() -> None:
    async with stack() as made:
        made.rank(facts=FACTS, latency_ms=5)
        gateway = await ready(made)
        await gateway.submit(1, [[1, 2, 3]], sampling=SamplingParams(max_tokens=400, seed=1, ignore_eos=True))
        await gateway.until(lambda: len(gateway.deltas.get(1, [])) >= 5)
        await gateway.abort(1)
        tokens, end = await gateway.generated(1)
        assert end == "aborted"
        whole, _ = reference([1, 2, 3], SamplingParams(max_tokens=400, seed=1, ignore_eos=True), MODEL)
        assert tokens == whole[: len(tokens)]
        assert 5 <= len(tokens) < 400
        params = SamplingParams(max_tokens=3, seed=2)
        assert await gateway.generate(2, [5], params) == reference([5], params, MODEL)


async def test_a_stream_goes_on_where_it_was_when_the_rank_is_killed() -> None:
    async with stack() as made:
        process = made.rank(facts=FACTS, latency_ms=5)
        gateway = await ready(made)
        for chunk, prompt, _ in prompts(6):
            await gateway.submit(chunk, [prompt], sampling=SamplingParams(max_tokens=60, seed=chunk, ignore_eos=True))
        await gateway.until(lambda: len(gateway.deltas) == 6)
        process.kill()
        made.rank(facts=FACTS)
        for chunk, prompt, _ in prompts(6):
            params = SamplingParams(max_tokens=60, seed=chunk, ignore_eos=True)
            assert await gateway.generated(chunk) == reference(prompt, params, MODEL)
            timings = gateway.deltas[chunk][-1].timings
            assert timings is not None
            assert timings.num_retries == 1
        assert made.schedulers[0].stats.num_deaths == 1
        assert not gateway.quarantines


async def test_a_prompt_that_ends_ranks_is_quarantined_and_its_neighbours_go_on() -> None:
    async with stack() as made:
        made.supervised_rank(facts=FACTS, latency_ms=2, die_on=DIE)
        gateway = await ready(made)
        for chunk, prompt, params in prompts(4):
            await gateway.submit(chunk, [prompt], sampling=params)
        await gateway.submit(9, [[7, DIE, 7]], sampling=SamplingParams(max_tokens=4, seed=1))
        assert await gateway.generated(9) == ([], "quarantined")
        for chunk, prompt, params in prompts(4):
            assert await gateway.generated(chunk) == reference(prompt, params, MODEL)
        again = SamplingParams(max_tokens=4, seed=77)  # a seed drawn anew does not make it another prompt
        assert await gateway.generate(10, [7, DIE, 7], again) == ([], "quarantined")
        assert made.schedulers[0].stats.num_deaths == 3
        assert gateway.quarantines


async def test_a_stream_goes_on_when_the_next_rank_has_less_memory() -> None:
    async with stack() as made:
        process = made.rank(facts=FACTS, latency_ms=5)
        gateway = await ready(made)
        params = SamplingParams(max_tokens=60, seed=2, ignore_eos=True)
        await gateway.submit(1, [[1, 2]], sampling=params)
        await gateway.until(lambda: gateway.deltas.get(1))
        process.kill()
        made.rank(facts=FACTS | {"num_blocks": 100})
        assert await gateway.generated(1) == reference([1, 2], params, MODEL)
        assert made.schedulers[0].facts == replace(MODEL, num_blocks=100)
        assert not made.logged("facts_changed")


async def test_ranks_that_have_diverged_are_ended_and_the_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real, broken = check_answer, [5]

    def check(step: Step, arrays: Arrays, residents: Residents) -> None:
        if step.step in broken and step.num_rows:
            arrays["lengths"][0] += 1
            broken.clear()
        real(step, arrays, residents)

    monkeypatch.setattr("scheduler.llm.planner.check_answer", check)
    async with stack() as made:
        made.supervised_rank(facts=FACTS)
        gateway = await ready(made)
        params = SamplingParams(max_tokens=30, seed=2, ignore_eos=True)
        assert await gateway.generate(1, [1, 2], params) == reference([1, 2], params, MODEL)
        (ended,) = made.logged("epoch_ends")
        assert "its slot holds" in str(ended["reason"])
        assert made.schedulers[0].stats.num_deaths == 1


async def test_what_cannot_run_is_refused_in_words() -> None:
    async with stack() as made:
        made.rank(facts=FACTS)
        gateway = await ready(made)
        await gateway.submit(1, [[1] * 500], sampling=SamplingParams(max_tokens=13))
        message, _ = await gateway.outcome(1)
        assert isinstance(message, Rejected)
        assert message.code == "invalid"
        assert "500 tokens and max_tokens is 13: together 513" in message.message
        params = SamplingParams(max_tokens=4, seed=1)
        assert await gateway.generate(2, [5, 999_999], params) == ([], "invalid")  # found by the rank
        assert await gateway.generate(3, [5], params, timeout_ms=0) == ([], "expired")


async def test_a_step_that_does_not_fit_is_made_smaller() -> None:
    async with stack() as made:
        made.rank(facts=FACTS, oom_over=100)
        gateway = await ready(made)
        params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
        assert await gateway.generate(1, list(range(1, 401)), params) == reference(list(range(1, 401)), params, MODEL)
        assert made.schedulers[0].stats.step_failures["oom"] >= 2


async def test_an_idle_model_proves_itself_with_canaries() -> None:
    async with stack() as made:
        made.rank(facts=FACTS)
        gateway = await ready(made, canary_interval_ms=100)
        scheduler = made.schedulers[0]
        await gateway.until(lambda: scheduler.stats.num_canaries >= 3)
        params = SamplingParams(max_tokens=3, seed=2)
        assert await gateway.generate(2, [5], params) == reference([5], params, MODEL)
        assert scheduler.stats.num_bad_canaries == 0
        assert 0 <= scheduler.status().forward_age_ms < 5000


async def test_draining_finishes_what_runs() -> None:
    async with stack() as made:
        made.rank(facts=FACTS, latency_ms=2)
        gateway = await ready(made)
        params = SamplingParams(max_tokens=50, seed=2, ignore_eos=True)
        await gateway.submit(1, [[1, 2]], sampling=params)
        await gateway.until(lambda: gateway.deltas.get(1))
        draining = asyncio.create_task(made.schedulers[0].drain())
        assert await gateway.generated(1) == reference([1, 2], params, MODEL)
        await draining


async def test_logprobs_come_as_asked() -> None:
    async with stack() as made:
        made.rank(facts=FACTS)
        gateway = await ready(made)
        params = SamplingParams(max_tokens=3, seed=2, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        tokens, _ = await gateway.generate(1, [5, 6, 7], params)
        deltas = gateway.deltas[1]
        assert [value for delta in deltas for value in delta.logprobs] == [-float(token) for token in tokens]
        top = [each for delta in deltas for each in delta.top_logprobs]
        assert top == [[(token, -float(token)), (token + 1, -float(token) - 1)] for token in tokens]
        prompt = [(token, value) for delta in deltas for ((token, value),) in delta.prompt_top_logprobs]
        assert [token for token, _ in prompt] == [6, 7]
        assert [value for _, value in prompt] == [value for delta in deltas for value in delta.prompt_logprobs]
