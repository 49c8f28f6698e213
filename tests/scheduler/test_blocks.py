"""Blocks and what lies in them: holders, content that outlives them, and the order in which it is overwritten."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ipc.types import SamplingParams
from scheduler.llm.blocks import BlockPool
from tests.scheduler.generation_sim import FACTS, GenerationSim


def test_content_outlives_its_holders_until_the_block_is_taken() -> None:
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.register(blocks[0], b"a")
    pool.register(blocks[1], b"b")
    pool.give_back(blocks)
    assert (pool.num_free, pool.num_cached) == (3, 2)
    assert pool.find(b"a") == blocks[0]
    pool.take(1)  # the empty one
    assert pool.find(b"a") is not None
    assert pool.take(1) == [blocks[1]]  # the sequence's last goes first
    assert (pool.find(b"a"), pool.find(b"b")) == (blocks[0], None)


def test_a_shared_block_is_free_when_its_last_holder_is_gone() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.register(block, b"a")
    pool.share([block])
    pool.give_back([block])
    assert pool.num_free == 1
    pool.give_back([block])
    assert (pool.num_free, pool.num_idle_among([block])) == (2, 1)
    pool.share([block])
    assert (pool.num_free, pool.num_idle_among([block])) == (1, 0)


def test_what_was_used_last_is_overwritten_last() -> None:
    pool = BlockPool(3)
    for content in (b"a", b"b", b"c"):
        pool.register(pool.take(1)[0], content)
    pool.give_back([0, 1, 2] if pool.find(b"a") == 0 else [2, 1, 0])
    found = pool.find(b"a")
    assert found is not None
    pool.share([found])
    pool.give_back([found])
    pool.take(2)
    assert pool.find(b"a") == found


def test_the_first_block_of_a_content_is_the_one_found() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.find(b"a") == first
    pool.give_back([second])
    assert pool.num_cached == 1


def test_giving_back_twice_is_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(blocks)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=80))
def test_every_block_is_free_or_held_as_often_as_counted(actions: list[tuple[int, int]]) -> None:
    pool, held = BlockPool(8), list[list[int]]()
    for action, value in actions:
        if action <= 2 and pool.num_free >= 1 + value % 3:
            held.append(pool.take(1 + value % 3))
        elif action == 3 and held:
            pool.give_back(held.pop(value % len(held)))
        elif action == 4 and held:
            for block in held[value % len(held)]:
                pool.register(block, bytes([value]))
        elif (found := pool.find(bytes([value]))) is not None:
            pool.share([found])
            held.append([found])
        count = [sum(blocks.count(block) for blocks in held) for block in range(8)]
        assert pool.num_holders == count
        assert pool.num_free == count.count(0)
        assert all(pool.find(bytes([each])) in (None, *range(8)) for each in range(10))


# --- the prefix cache, through the planner ------------------------------------------------------------------

PROMPT = list(range(1, 71))  # four full blocks and a bit


def cached_of(sim: GenerationSim, prompt: list[int], **changes: object) -> int:
    """The cached tokens of one more generation, run to its end."""
    params = changes.pop("params", SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
    chunk_id = len(sim.clients)
    assert sim.add(prompt, params, **changes) is None  # type: ignore[arg-type]
    sim.drain()
    sim.check_answers()
    sim.check_nothing_left()
    last = sim.clients[chunk_id].last
    return last.num_cached_tokens  # type: ignore[union-attr]


@pytest.fixture
def sim():  # type: ignore[no-untyped-def]
    made = GenerationSim()
    yield made
    made.close()


def test_a_prompt_seen_before_is_computed_from_its_last_partial_block_on(sim: GenerationSim) -> None:
    assert cached_of(sim, PROMPT) == 0
    assert cached_of(sim, PROMPT) == 64
    assert cached_of(sim, PROMPT[:40] + [9, 9, 9]) == 32
    assert cached_of(sim, [9] + PROMPT[1:]) == 0
    assert sim.stats.generation is not None
    assert sim.stats.generation.num_prefix_hit_tokens == 96


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    sim = GenerationSim(facts=replace(FACTS, max_draft_tokens=0))
    assert cached_of(sim, PROMPT[:64]) == 0
    assert cached_of(sim, PROMPT[:64]) == 48
    assert cached_of(sim, PROMPT[:65]) == 64  # the block's last token has been computed by now
    sim.close()


def test_with_drafts_a_block_is_known_by_the_token_behind_it_too(sim: GenerationSim) -> None:
    """A draft head's entry for a block's last token is made of the next one."""
    assert cached_of(sim, PROMPT[:64]) == 0
    assert cached_of(sim, PROMPT[:64]) == 48
    assert cached_of(sim, PROMPT[:65]) == 48  # an output followed there
    assert cached_of(sim, PROMPT[:65]) == 64
    assert cached_of(sim, [*PROMPT[:64], *sim.clients[0].tokens]) == 64


def test_the_next_turn_finds_the_answer_too(sim: GenerationSim) -> None:
    cached_of(sim, PROMPT, params=SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    turn = PROMPT + sim.clients[0].tokens + [5]
    assert len(turn) == 101
    assert cached_of(sim, turn) == 96


def test_other_salts_and_prompt_logprobs_find_nothing(sim: GenerationSim) -> None:
    assert cached_of(sim, PROMPT, cache_salt=b"a") == 0
    assert cached_of(sim, PROMPT, cache_salt=b"b") == 0
    assert cached_of(sim, PROMPT) == 0
    assert cached_of(sim, PROMPT, cache_salt=b"a") == 64
    assert cached_of(sim, PROMPT, params=SamplingParams(max_tokens=4, seed=1, prompt_logprobs=0)) == 0


def test_the_cache_can_be_turned_off() -> None:
    sim = GenerationSim(prefix_cache=False)
    assert cached_of(sim, PROMPT) == cached_of(sim, PROMPT) == 0
    assert sim.planner.residents.blocks.num_cached == 0
    sim.close()


def test_a_block_is_hit_only_when_the_step_that_computes_it_was_answered(sim: GenerationSim) -> None:
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    for _ in range(3):
        sim.add(PROMPT[:40], params)
    sim.plan()  # the first, and of the second what the step takes
    sim.plan()
    assert sim.planner.residents.blocks.num_cached == 0
    sim.run_rank()
    sim.deliver()
    assert sim.planner.residents.blocks.num_cached == 2
    sim.drain()
    sim.check_answers()
    cached = [client.last.num_cached_tokens for client in sim.clients.values()]  # type: ignore[union-attr]
    assert cached == [0, 0, 0]  # all had entered before the first answer


@pytest.fixture
def wide() -> Iterator[GenerationSim]:
    made = GenerationSim(facts=replace(FACTS, max_model_len=256, max_num_batched_tokens=400, num_blocks=60))
    yield made
    made.drain()
    made.check_answers()
    made.check_nothing_left()
    made.close()


def add_choices(sim: GenerationSim, prompt: list[int], count: int) -> None:
    for _ in range(count):
        sim.add(prompt, SamplingParams(max_tokens=4, seed=len(sim.clients), ignore_eos=True))


def test_choices_of_one_request_share_their_prompt(wide: GenerationSim) -> None:
    """Only the first computes it; the others pass nobody else by, and enter once that step was answered."""
    prompt, other = list(range(90)), list(range(90, 0, -1))
    add_choices(wide, prompt, 3)
    add_choices(wide, other, 1)
    wide.drain()
    cached = [client.last.num_cached_tokens for client in wide.clients.values()]  # type: ignore[union-attr]
    assert cached == [0, 80, 80, 0]
    entered = {chunk: step for step, content in reversed(list(enumerate(wide.contents))) for chunk in content}
    assert entered == {0: 0, 3: 0, 1: 2, 2: 2}


def test_nobody_waits_for_a_prompt_whose_client_gave_up(wide: GenerationSim) -> None:
    add_choices(wide, list(range(90)), 3)
    wide.plan()
    assert set(wide.contents[-1]) == {0}
    wide.abort(0)
    wide.plan()
    assert set(wide.contents[-1]) == {1}


def test_nobody_waits_for_a_prompt_whose_steps_fail(wide: GenerationSim) -> None:
    add_choices(wide, list(range(90)), 2)
    wide.rank._oom = 1.0
    for _ in range(4):
        wide.run_step()
    assert wide.seen["failed steps"] == 4
    wide.rank._oom = 0.0
    wide.drain()
    assert [client.end for client in wide.clients.values()] == ["length", "length"]


def test_waiting_without_new_hits_has_a_bound(wide: GenerationSim) -> None:
    add_choices(wide, list(range(90)), 1)
    sequence = wide.planner.roster.pool.first("interactive")
    assert sequence is not None
    looks = ((0, 5), (0, 6), (0, 7), (4, 8), (4, 9), (4, 10))
    waits = [sequence.may_wait(num_hits, step, 2) for num_hits, step in looks]
    assert waits == [True, True, False, True, True, False]


def test_a_short_beginning_is_not_waited_for(wide: GenerationSim) -> None:
    add_choices(wide, list(range(64)), 2)  # its last token is computed anyway
    wide.plan()
    assert set(wide.contents[0]) == {0, 1}


def test_new_ranks_have_nothing_cached(sim: GenerationSim) -> None:
    cached_of(sim, PROMPT)
    sim.die(ordered=True)
    assert cached_of(sim, PROMPT) == 0


def test_content_is_overwritten_when_memory_is_wanted(sim: GenerationSim) -> None:
    cached_of(sim, PROMPT)
    for start in range(5):
        cached_of(sim, [start + 90] + list(range(95)), params=SamplingParams(max_tokens=20, seed=2))
    assert cached_of(sim, PROMPT) == 0
