"""The policy of generation: order, classes, memory, endings, the door. Tokens are checked against the model's own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from ipc.step import KIND_DECODE, KIND_PREFILL, StepFailed, StepResult
from ipc.submit import Rejected, TokenDelta
from ipc.types import SamplingParams
from scheduler.planner import RANKS_AWAY
from tests.fakes.stateful_rank import UNUSABLE_SEED
from tests.scheduler.generation_sim import FACTS, GenerationSim

Make = Callable[..., GenerationSim]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes simulations; after the test, whatever it did, all memory must come back."""
    made: list[GenerationSim] = []

    def sim(config: dict[str, Any] | None = None, **facts: object) -> GenerationSim:
        made.append(GenerationSim(facts=replace(FACTS, **facts), **(config or {})))
        return made[-1]

    yield sim
    for each in made:
        each.drain()
        each.check_answers()
        each.check_nothing_left()
        each.close()


def greedy(max_tokens: int = 4, seed: int = 1, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **changes)  # type: ignore[arg-type]


def add_many(sim: GenerationSim, count: int, length: int = 8, max_tokens: int = 4, **changes: object) -> list[int]:
    first = len(sim.clients)
    for chunk_id in range(first, first + count):
        prompt = [(chunk_id * 7 + place) % FACTS.vocab_size for place in range(length)]
        assert sim.add(prompt, greedy(max_tokens, seed=chunk_id), **changes) is None
    return list(range(first, first + count))


def message_of(sim: GenerationSim, chunk_id: int) -> Rejected:
    last = sim.clients[chunk_id].last
    assert isinstance(last, Rejected)
    return last


# --- order and classes --------------------------------------------------------------------------------------


def test_first_come_first_served(make: Make) -> None:
    sim = make(num_blocks=100)
    chunks = add_many(sim, 20, length=30)
    sim.drain()
    entered = [chunk for content in sim.contents for chunk, (kind, _) in content.items() if kind == KIND_PREFILL]
    assert list(dict.fromkeys(entered)) == chunks


def test_decode_and_prefill_share_steps(make: Make) -> None:
    sim = make(num_blocks=100)
    add_many(sim, 2, max_tokens=40)
    sim.run_step()
    sim.run_step()
    add_many(sim, 1, length=88)
    sim.run_step()
    sim.run_step()
    mixed = [content for content in sim.contents if {kind for kind, _ in content.values()} == {0, 1}]
    assert mixed
    assert mixed[0][0] == mixed[0][1] == (KIND_DECODE, 1)
    assert mixed[0][2] == (KIND_PREFILL, 46)  # what the two left of 48


def test_prefill_goes_on_beside_decode_rows_that_would_fill_every_step(make: Make) -> None:
    sim = make(num_blocks=100, max_num_seqs=9, max_num_batched_tokens=8)
    add_many(sim, 8, length=2, max_tokens=60)
    while not all(sim.clients[chunk].tokens for chunk in range(8)):
        sim.run_step()
    add_many(sim, 1, length=40, max_tokens=2)
    start = len(sim.contents)
    while not sim.clients[8].tokens:
        sim.run_step()
    steps = sim.contents[start:]
    assert len(steps) < 40 / 2 + 5  # a quarter of 8 tokens in each
    rows = [sum(chunk in content for content in steps[2:]) for chunk in range(8)]
    assert min(rows) > 0
    assert max(rows) - min(rows) <= 2, "those that waited longest go first"


def test_interactive_work_enters_before_bulk_that_came_earlier(make: Make) -> None:
    sim = make(num_blocks=100)
    bulk = add_many(sim, 10, length=40, priority="bulk")
    quick = add_many(sim, 3, length=40)
    sim.drain()
    first = {}
    for number, content in enumerate(sim.contents):
        for chunk in content:
            first.setdefault(chunk, number)
    assert max(first[chunk] for chunk in quick) < sorted(first[chunk] for chunk in bulk)[3]


def test_bulk_keeps_its_share_of_prefill(make: Make) -> None:
    sim = make({"bulk_wait_ms": 10**9, "bulk_share": 0.2, "prefix_cache": False}, num_blocks=200, max_num_seqs=20)
    interactive, bulk = set[int](), set[int]()
    for _ in range(200):
        interactive |= set(add_many(sim, 4, length=30, max_tokens=1)) if sim.stats.pending_requests < 60 else set()
        if sum(not sim.clients[chunk].end for chunk in bulk) < 5:
            bulk |= set(add_many(sim, 2, length=30, max_tokens=1, priority="bulk"))
        sim.run_step()
    tokens = [
        sum(count for content in sim.contents for chunk, (_, count) in content.items() if chunk in group)
        for group in (interactive, bulk)
    ]
    assert 0.15 < tokens[1] / sum(tokens) < 0.3, tokens


def test_bulk_that_had_nothing_for_its_wait_goes_first(make: Make) -> None:
    sim = make({"bulk_wait_ms": 2000, "bulk_share": 0.0}, num_blocks=100)
    add_many(sim, 1, length=30, max_tokens=1, priority="bulk")
    for _ in range(30):
        add_many(sim, 2, length=48, max_tokens=1)
        sim.run_step()
    assert not any(0 in content for content in sim.contents)
    sim.now += 2
    add_many(sim, 2, length=48, max_tokens=1)
    while not any(0 in content for content in sim.contents):
        sim.run_step()
    assert sum(0 in content for content in sim.contents) == 1


def test_interactive_work_does_not_yield_to_bulk_in_a_step_that_is_bulk_s_own(make: Make) -> None:
    sim = make({"bulk_wait_ms": 0, "prefix_cache": False}, num_blocks=8, max_num_batched_tokens=64)
    add_many(sim, 1, length=100)
    sim.plan()
    add_many(sim, 1, length=40, priority="bulk")
    sim.plan()
    assert [set(content) for content in sim.contents] == [{0}, {1}]  # the rest of its prompt lacks a block
    sim.drain()
    prefilled = [content[0][1] for content in sim.contents if content.get(0, (KIND_DECODE, 0))[0] == KIND_PREFILL]
    assert prefilled == [64, 36]
    assert sim.stats.generation is not None
    assert sim.stats.generation.num_preemptions == 1


def test_interactive_work_displaces_bulk_from_slots_but_for_its_share(make: Make) -> None:
    sim = make({"bulk_share": 0.34}, num_blocks=100)
    bulk = add_many(sim, 6, max_tokens=100, priority="bulk")
    for _ in range(4):
        sim.run_step()
    assert len(sim.planner.residents.running) == 6
    add_many(sim, 10, max_tokens=20)
    for _ in range(6):
        sim.run_step()
    running = [sequence.chunk_id for sequence in sim.planner.residents.running]
    assert sorted(set(running) & set(bulk)) == bulk[:2]
    assert len(running) == 6


# --- memory -------------------------------------------------------------------------------------------------


def test_the_youngest_yields_when_blocks_run_out_and_all_come_to_their_end(make: Make) -> None:
    sim = make(num_blocks=8)
    add_many(sim, 3, length=16, max_tokens=90)
    seen: list[list[int]] = []
    while sim.stats.pending_requests:
        sim.run_step()
        sim.check_memory()
        seen.append([sequence.chunk_id for sequence in sim.planner.residents.running])
    assert sim.stats.generation is not None
    assert 0 < sim.stats.generation.num_preemptions < 10
    assert all(running == sorted(running) for running in seen)
    ends = [next(n for n, running in enumerate(seen) if n > 3 and chunk not in running) for chunk in range(3)]
    assert ends[0] > ends[1] > ends[2], "the first was never out of its slot before its end"


def test_bulk_yields_before_younger_interactive_work(make: Make) -> None:
    sim = make(num_blocks=8)
    add_many(sim, 1, length=16, max_tokens=80, priority="bulk")
    sim.run_step()
    add_many(sim, 1, length=16, max_tokens=80)
    while not sim.clients[1].end:
        sim.run_step()
        assert any(sequence.chunk_id == 1 for sequence in sim.planner.residents.running) or sim.clients[1].end
    assert sim.stats.generation is not None
    assert sim.stats.generation.num_preemptions > 0


# --- endings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_ends_it_wherever_it_is(make: Make, steps: int) -> None:
    sim = make()
    add_many(sim, 2, length=60, max_tokens=30)
    for _ in range(steps):
        sim.run_step()
    sim.plan()
    sim.abort(0)
    assert message_of(sim, 0).code == "aborted"
    sim.abort(0)  # unknown by now
    sim.drain()
    assert sim.clients[1].end == "length"


def test_a_stop_string_ends_it_well(make: Make) -> None:
    sim = make()
    add_many(sim, 1, length=20, max_tokens=30)
    for _ in range(3):
        sim.run_step()
    sim.abort(0, "stop")
    assert message_of(sim, 0).code == "aborted"
    assert dict(sim.stats.requests) == {"ok": 1}
    assert sim.stats.generation is not None
    assert sim.stats.generation.num_prompt_tokens == 20


def test_deadlines_end_those_that_wait_and_those_that_run(make: Make) -> None:
    sim = make(max_num_seqs=1)
    add_many(sim, 2, length=20, max_tokens=90, timeout_ms=200)
    add_many(sim, 1)
    sim.run_step()
    assert len(sim.planner.residents.running) == 1
    for _ in range(30):
        sim.run_step()
    assert [message_of(sim, chunk).code for chunk in (0, 1)] == ["expired", "expired"]
    assert len(sim.clients[0].tokens) > 5
    sim.drain()
    assert sim.clients[2].end == "length"


def test_the_last_delta_tells_what_it_took(make: Make) -> None:
    sim = make()
    add_many(sim, 1, length=60, max_tokens=5)
    sim.now += 0.5
    sim.drain()
    last = sim.clients[0].last
    assert isinstance(last, TokenDelta)
    assert last.timings is not None
    assert last.timings.queue_ms == pytest.approx(500)
    assert last.timings.num_steps == 6  # two chunks, the second of which gives a token
    assert (last.num_prompt_tokens, last.finish_reason, len(last.tokens)) == (60, "length", 1)


def test_the_first_token_tells_what_it_took_so_far(make: Make) -> None:
    """All that a gateway learns which then finds a stop string."""
    sim = make()
    add_many(sim, 1, length=60, max_tokens=1)
    sim.drain()
    sim.add(sim.clients[0].prompt, greedy(40))
    while not sim.clients[1].tokens:
        sim.run_step()
    first = sim.clients[1].deltas[0]
    assert first.finish_reason is None
    assert first.num_cached_tokens == 48
    assert first.timings is not None
    assert first.timings.num_steps == 1
    sim.die(ordered=True)  # tokens that were sent are no first ones again
    sim.drain()
    told = [delta for delta in sim.clients[1].deltas if delta.timings is not None]
    assert told == [first, sim.clients[1].last]


def test_work_that_only_waits_goes_elsewhere_when_ranks_stay_away(make: Make) -> None:
    sim = make(max_num_seqs=1)
    add_many(sim, 3, max_tokens=20)
    for _ in range(4):
        sim.run_step()
    sim.die(ordered=True)
    for chunk in range(3):
        sim.abort(chunk, RANKS_AWAY)
    assert [sim.clients[chunk].end for chunk in range(3)] == ["", "not_ready", "not_ready"]  # the first has streamed


# --- the door -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "changes", "words"),
    [
        ([], greedy(), {}, "empty"),
        ([1] * 100, greedy(29), {}, "100 tokens and max_tokens is 29: together 129, and model fake takes 128"),
        ([1], greedy(0), {}, "max_tokens is 0"),
        ([1], greedy(4, min_tokens=5), {}, "min_tokens 5"),
        ([1], greedy(grammar="g" * 300_000), {}, "bytes"),
        ([1], greedy(logprobs=1), {}, "logprobs is 1"),
        ([1], greedy(prompt_logprobs=3), {}, "prompt_logprobs is 3"),
        ([1], greedy(logit_bias={97: 1.0}), {}, "logit_bias names token 97"),
        ([1], greedy(stop_token_ids=(1, 100)), {}, "stop_token_ids names token 100"),
        ([1, 2], greedy(), {"lengths": [1, 1]}, "a chunk for each"),
        ([1, 2], greedy(), {"lengths": [3]}, "the frame holds 2"),
        ([1], None, {}, "send sampling parameters"),
    ],
)
def test_what_can_never_run_is_refused_in_words(
    make: Make, prompt: list[int], params: SamplingParams, changes: dict[str, object], words: str
) -> None:
    refused = make().add(prompt, params, **changes)
    assert refused is not None
    assert refused.code == "invalid"
    assert words in refused.message


def test_what_memory_can_never_hold_is_refused(make: Make) -> None:
    sim = make(num_blocks=4)
    refused = sim.add([1] * 40, greedy(25))
    assert refused is not None
    assert "need 5 blocks of 16 tokens; the ranks' memory has 4" in refused.message
    assert sim.add([1] * 40, greedy(24)) is None


def test_the_pool_is_bounded_in_requests_and_in_tokens(make: Make) -> None:
    sim = make({"max_pending_requests": 3, "max_pending_tokens": 100})
    add_many(sim, 2, length=40)
    refused = sim.add([1] * 30, greedy())
    assert refused is not None
    assert (refused.code, refused.retry_after_ms > 0) == ("full", True)
    assert sim.add([1] * 20, greedy()) is None
    refused = sim.add([1], greedy())
    assert refused is not None
    assert refused.code == "full"


# --- health and memory of the device ------------------------------------------------------------------------


def test_a_canary_runs_at_once_and_when_nothing_finished_for_a_while(make: Make) -> None:
    sim = make({"canary_interval_ms": 1000})
    plan = sim.plan()
    assert plan is not None
    assert (plan.canary, plan.kind, plan.num_seqs) == (True, "generate", 1)
    sim.run_rank()
    sim.deliver()
    assert sim.stats.last_forward == sim.now
    sim.drain()
    sim.now += 1.1
    add_many(sim, 1)
    sim.drain()
    assert sim.stats.num_canaries == 1, "work proves as much"
    sim.now += 1.1
    sim.drain()
    assert sim.stats.num_canaries == 2
    assert sim.rank.slots == [None] * 6


def test_a_canary_without_a_finite_token_is_counted(make: Make) -> None:
    sim = make({"canary_interval_ms": 1000})
    plan = sim.plan()
    assert plan is not None
    assert sim.ring is not None
    sim.run_rank()
    sim.ring.slot(plan.slot)["status"][0] = 2
    sim.deliver()
    assert (sim.stats.num_bad_canaries, sim.stats.last_forward) == (1, None)


@pytest.mark.parametrize(("grammar", "named"), [(None, "the sampling parameters"), ("start: /a/", "the grammar")])
def test_what_ranks_cannot_follow_is_not_called_a_bad_token(make: Make, grammar: str | None, named: str) -> None:
    sim = make()
    sim.add([1, 2, 3], SamplingParams(max_tokens=4, seed=UNUSABLE_SEED, grammar=grammar))
    add_many(sim, 1)
    sim.drain()
    refused = message_of(sim, 0)
    assert (refused.code, refused.index) == ("invalid", None)
    assert named in refused.message
    assert sim.clients[1].end == "length"


def test_idle_steps_when_the_ranks_have_a_use_for_them(make: Make) -> None:
    sim = make()
    add_many(sim, 1, max_tokens=1)
    plan = sim.plan()
    assert plan is not None
    sim.run_rank()
    sim.from_rank.clear()
    assert sim.ring is not None
    sim.reply(sim.planner.apply(StepResult(sim.epoch, plan.step, idle_work=True), sim.ring.slot(plan.slot), sim.now))
    sim.free.append(plan.slot)
    releases = sim.plan()
    assert releases is not None
    assert (releases.num_releases, releases.num_seqs) == (1, 0)
    sim.run_rank()
    _, slot = sim.from_rank.popleft()
    sim.planner.apply(StepResult(sim.epoch, releases.step, idle_work=True), sim.ring.slot(slot), sim.now)
    sim.free.append(slot)
    idle, _ = sim.planner.plan(sim.now, sim.free[0], sim.ring.slot(sim.free[0]))
    assert idle is not None
    assert (idle.kind, idle.canary, idle.num_seqs) == ("idle", True, 0)
    sim.planner.apply(StepResult(sim.epoch, idle.step), sim.ring.slot(idle.slot), sim.now)
    assert sim.plan() is None


def test_after_a_failed_step_steps_are_half_as_large_and_alone_until_all_is_well(make: Make) -> None:
    sim = make(num_blocks=100)
    add_many(sim, 4, length=12, max_tokens=8)
    sim.rank._oom = 1.0
    sim.plan()
    sim.run_rank()
    sim.deliver()
    sim.rank._oom = 0.0
    assert sum(count for _, count in sim.contents[0].values()) == 48
    plan = sim.plan()
    assert plan is not None
    assert sum(count for _, count in sim.contents[1].values()) == 24
    assert sim.plan() is None
    sim.run_rank()
    sim.deliver()
    sim.drain()
    assert {client.end for client in sim.clients.values()} == {"length"}
    last = sim.clients[0].last
    assert isinstance(last, TokenDelta)
    assert last.timings is not None
    assert last.timings.num_retries == 1


def test_what_does_not_fit_even_alone_is_rejected_and_the_rest_goes_on(make: Make) -> None:
    sim = make(num_blocks=100)
    add_many(sim, 1, length=60)
    sim.rank._oom = 1.0
    while not sim.clients[0].end:
        sim.run_step()
    assert message_of(sim, 0).code == "out_of_memory"
    sim.rank._oom = 0.0
    add_many(sim, 2)
    sim.drain()
    assert sim.clients[1].end == sim.clients[2].end == "length"


def test_a_failure_may_be_told_before_the_result_of_an_older_step(make: Make) -> None:
    sim = make(num_blocks=100)
    add_many(sim, 1, length=88, max_tokens=6)
    first, second = sim.plan(), sim.plan()
    assert first is not None
    assert second is not None
    sim.run_rank()
    sim.rank._oom = 1.0
    sim.run_rank()
    sim.rank._oom = 0.0
    sim.from_rank.rotate(1)
    sim.deliver()
    assert sim.seen["failed steps"] == 1
    sim.deliver()
    sim.drain()
    assert sim.clients[0].end == "length"


def test_results_for_unknown_steps_are_stale(make: Make) -> None:
    sim = make()
    assert sim.ring is not None
    for result in (StepResult(sim.epoch, 99), StepFailed(sim.epoch, 99, "oom")):
        assert sim.planner.apply(result, sim.ring.slot(0), sim.now) == []
    assert sim.stats.stale["rank"] == 2
