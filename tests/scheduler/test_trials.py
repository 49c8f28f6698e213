"""After a death: what was in flight runs alone until it is cleared; who ends ranks alone is convicted."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from ipc.step import KIND_DECODE, KIND_PREFILL
from ipc.submit import Rejected, TokenDelta
from ipc.types import MAX_ATTEMPTS, SamplingParams
from scheduler.quarantine import fingerprint
from tests.scheduler.generation_sim import FACTS, GenerationSim


class Deaths(GenerationSim):
    """Ranks die of any row of the chunks in `poison` (of the given kinds) that they are to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.poison: set[int] = set()
        self.kinds = {KIND_PREFILL, KIND_DECODE}
        self.num_deaths = 0

    def run_rank(self) -> None:
        if self.to_rank:
            content = self.contents[len(self.contents) - len(self.to_rank)]
            if any(chunk in self.poison and kind in self.kinds for chunk, (kind, _) in content.items()):
                self.num_deaths += 1
                self.die()
                return
        super().run_rank()

    def die(self, ordered: bool = False) -> None:
        super().die(ordered)
        self.to_rank.clear()
        self.from_rank.clear()

    def submit(self, count: int, length: int = 8, max_tokens: int = 6, **changes: object) -> list[int]:
        first = len(self.clients)
        for chunk_id in range(first, first + count):
            prompt = [(chunk_id * 7 + place) % FACTS.vocab_size for place in range(length)]
            params = SamplingParams(max_tokens=max_tokens, seed=chunk_id, ignore_eos=True)
            assert self.add(prompt, params, **changes) is None
        return list(range(first, first + count))

    def code(self, chunk_id: int) -> str:
        return self.clients[chunk_id].end

    def num_retries(self, chunk_id: int) -> int:
        last = self.clients[chunk_id].last
        assert isinstance(last, TokenDelta)
        assert last.timings is not None
        return last.timings.num_retries


@pytest.fixture
def sim() -> Iterator[Deaths]:
    made = Deaths()
    yield made
    made.drain()
    made.check_answers()
    made.check_nothing_left()
    made.close()


def test_a_death_in_company_costs_everybody_a_retry_and_no_token(sim: Deaths) -> None:
    sim.submit(5, max_tokens=20)
    for _ in range(6):
        sim.run_step()
    told = [len(client.tokens) for client in sim.clients.values()]
    assert min(told) > 0
    sim.plan()
    sim.die()
    sim.drain()
    assert {client.end for client in sim.clients.values()} == {"length"}
    assert [sim.num_retries(chunk) for chunk in range(5)] == [1] * 5
    assert len(sim.quarantine) == 0


def test_suspects_run_alone_for_their_prefill_and_one_decode_step_the_oldest_first(sim: Deaths) -> None:
    sim.submit(3, length=60, max_tokens=20)
    for _ in range(9):
        sim.run_step()
    sim.plan()
    sim.die()
    sim.submit(1)  # innocent, and waits
    start = len(sim.contents)
    for _ in range(30):
        assert sim.num_in_flight == 0
        sim.plan()
        trials = any(len(content) > 1 for content in sim.contents[start:])
        if trials:
            break
        assert sim.plan() is None, "nothing else in flight"
        sim.run_rank()
        sim.deliver()
    alone = [next(iter(content.items())) for content in sim.contents[start:-1]]
    expected = [(chunk, kind) for chunk in range(3) for kind in (KIND_PREFILL, KIND_PREFILL, KIND_DECODE)]
    assert [(chunk, kind) for chunk, (kind, _) in alone] == expected
    assert set(sim.contents[-1]) == {0, 1, 2, 3}
    assert not sim.quarantine._suspects


def test_who_ends_ranks_twice_alone_is_quarantined(sim: Deaths) -> None:
    sim.submit(5)
    sim.poison = {2}
    sim.drain()
    assert sim.code(2) == "quarantined"
    assert sim.num_deaths == 3
    last = sim.clients[2].last
    assert isinstance(last, Rejected)
    assert (last.index, last.attempt) == (0, 3)
    for chunk in (0, 1, 3, 4):
        assert sim.code(chunk) == "length"
    (found,) = sim.quarantine.take_news()
    request_prompt = [(2 * 7 + place) % FACTS.vocab_size for place in range(8)]
    refused = sim.add(request_prompt, SamplingParams(max_tokens=6, seed=99, ignore_eos=True))
    assert refused is not None
    assert refused.code == "quarantined"  # another seed is no other prompt
    assert sim.add(request_prompt, SamplingParams(max_tokens=6, seed=99, temperature=0.5)) is None
    assert len(found) == 16


def test_one_that_ends_ranks_only_while_it_decodes_is_found_as_well(sim: Deaths) -> None:
    sim.kinds = {KIND_DECODE}
    sim.submit(4)
    sim.poison = {1}
    sim.drain()
    assert sim.code(1) == "quarantined"
    assert len(sim.clients[1].tokens) >= 1
    assert [sim.code(chunk) for chunk in (0, 2, 3)] == ["length"] * 3


def test_a_cleared_one_keeps_its_slot_and_waits_for_the_others(sim: Deaths) -> None:
    sim.submit(2, max_tokens=30)
    for _ in range(4):
        sim.run_step()
    sim.plan()
    sim.die()
    told = len(sim.clients[0].tokens)
    sim.run_step()
    sim.run_step()
    sim.run_step()
    assert [sequence.chunk_id for sequence in sim.planner.residents.running] == [0, 1]
    assert len(sim.clients[0].tokens) == told + 2


def test_an_ordered_stop_counts_for_nothing(sim: Deaths) -> None:
    sim.submit(3, max_tokens=20)
    for _ in range(10):
        sim.run_step()
        sim.plan()
        sim.die(ordered=True)
    sim.drain()
    assert [sim.num_retries(chunk) for chunk in range(3)] == [0] * 3
    assert not any(sim.quarantine.suspected(each.request, sim.now) for each in sim.planner.roster.pool)


def test_attempts_that_others_counted_count(sim: Deaths) -> None:
    sim.submit(1, attempt=MAX_ATTEMPTS)
    sim.submit(1)
    sim.plan()
    sim.die()
    assert sim.code(0) == "lost"
    sim.drain()
    assert sim.code(1) == "length"


def test_a_suspect_may_be_aborted_or_expire_while_it_is_held(sim: Deaths) -> None:
    sim.submit(1, timeout_ms=100)
    sim.submit(3)
    sim.plan()
    sim.die()
    sim.abort(1)
    sim.now += 1
    sim.drain()
    assert [sim.code(chunk) for chunk in range(4)] == ["expired", "aborted", "length", "length"]


def test_suspicion_outlives_a_client_that_gives_up(sim: Deaths) -> None:
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    sim.add([1, 2, 3], params)
    sim.plan()
    sim.die()
    sim.abort(0)
    sim.submit(2)
    sim.add([1, 2, 3], params)
    sim.drain()
    alone = [content for content in sim.contents if 3 in content]
    assert all(len(content) == 1 for content in alone[:2])
    assert sim.code(3) == "length"


def test_suspicion_falls_on_those_that_gave_up_before_the_death(sim: Deaths) -> None:
    """A prompt on which ranks hang, and a client with less patience than a step's deadline, over and over."""
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    for _ in range(3):
        assert sim.add([1, 2, 3], params) is None
        sim.plan()
        sim.abort(len(sim.clients) - 1)
        sim.die()
    refused = sim.add([1, 2, 3], params)
    assert refused is not None
    assert refused.code == "quarantined"
    assert [client.end for client in sim.clients.values()] == ["aborted"] * 3 + ["quarantined"]
    assert len(sim.quarantine.take_news()) == 1


def test_an_ordered_stop_casts_no_suspicion_on_those_that_gave_up(sim: Deaths) -> None:
    sim.submit(1)
    sim.plan()
    sim.abort(0)
    sim.die(ordered=True)
    assert not sim.quarantine._suspects


def test_news_of_convicts_reach_those_that_wait(sim: Deaths) -> None:
    sim.submit(8)
    sim.run_step()
    waiting = next(each for each in sim.planner.roster.pool if each.slot < 0)
    sim.quarantine.accept([fingerprint(waiting.request, 0)], 60_000, sim.now)
    sim.drain()
    assert sim.code(waiting.chunk_id) == "quarantined"
    assert sum(client.end == "length" for client in sim.clients.values()) == 7


def test_memory_yields_to_a_trial() -> None:
    """Cleared sequences hold all blocks when the last suspect, a long one, is tried."""
    sim = Deaths()
    sim.submit(5, length=60, max_tokens=20)
    for _ in range(12):
        sim.run_step()
    sim.plan()
    sim.die()
    sim.drain()
    sim.check_answers()
    sim.check_nothing_left()
    assert {client.end for client in sim.clients.values()} == {"length"}
    sim.close()


@pytest.mark.parametrize("num_blocks", [40, 12])
def test_ranks_that_come_back_with_another_share_of_memory(num_blocks: int) -> None:
    sim = Deaths()
    sim.submit(3, length=60, max_tokens=20)
    sim.submit(3, length=88, max_tokens=40)
    for _ in range(8):
        sim.run_step()
    told = [len(sim.clients[chunk].tokens) for chunk in range(3)]
    assert min(told) > 0
    sim.facts = replace(FACTS, num_blocks=num_blocks)
    sim.die()
    sim.planner.facts = sim.facts
    sim.drain()
    sim.check_answers()
    sim.check_nothing_left()
    assert {client.end for client in sim.clients.values()} == {"length"}
    sim.close()


def test_what_the_new_ranks_can_never_hold_is_rejected() -> None:
    sim = Deaths()
    sim.submit(2, length=60, max_tokens=20)
    sim.submit(1, length=88, max_tokens=40)
    sim.run_step()
    sim.facts = replace(FACTS, num_blocks=7)
    sim.die()
    sim.planner.facts = sim.facts
    sim.drain()
    sim.check_nothing_left()
    assert [sim.code(chunk) for chunk in range(3)] == ["length", "length", "out_of_memory"]
    sim.close()
