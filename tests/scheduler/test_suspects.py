"""After a death: requeue, suspects that run alone, quarantine, attempts. Innocent neighbours pay one retry."""

import pytest

from ipc.submit import Rejected, Result
from ipc.types import OutputSpec
from scheduler.quarantine import MAX_ENTRIES, MAX_SUSPECTS, Quarantine, fingerprint
from scheduler.request import Request
from tests.scheduler.sim import GATEWAY, POISON, Sim, facts


@pytest.fixture
def sim() -> Sim:
    return Sim(facts(max_num_seqs=64, max_num_batched_tokens=256), canary_interval_ms=10**9)


def test_an_ordered_stop_counts_for_nothing(sim: Sim) -> None:
    sim.submit(1, [[1], [2]])
    for _ in range(10):
        sim.fill()
        sim.die(ordered=True)
    sim.run()
    message = sim.answer(1)
    assert isinstance(message, Result)
    assert sim.contents[-1] == [[1], [2]]  # together: nobody is a suspect


def test_what_was_in_flight_runs_again_first_and_in_order(sim: Sim) -> None:
    for chunk in range(20):
        sim.submit(chunk, [[chunk + 1] * 30])  # 8 a step, two steps in flight
    sim.fill()
    sim.die(ordered=True)
    sim.run()
    order = [row[0] for rows in sim.contents[2:] for row in rows]
    assert order == list(range(1, 21))


def test_a_kill_with_one_request_in_flight_is_answered(sim: Sim) -> None:
    sim.submit(1, [[1, 2, 3]])
    sim.fill()
    sim.die()
    assert (GATEWAY, 1) not in sim.answers
    sim.run()
    message = sim.answer(1)
    assert isinstance(message, Result)
    assert message.timings.num_retries == 1
    assert len(sim.quarantine) == 0


def test_two_kills_in_a_row_are_survived_too(sim: Sim) -> None:
    sim.submit(1, [[1, 2, 3]])
    for _ in range(2):
        sim.fill()
        sim.die()
    sim.run()
    assert sim.code(1) == "ok"
    assert len(sim.quarantine) == 0


def test_one_poison_row_among_sixty_costs_its_neighbours_a_retry(sim: Sim) -> None:
    for chunk in range(60):
        sim.submit(chunk, [[chunk + 1, POISON if chunk == 33 else 1]])
    sim.run()
    assert sim.num_deaths == 3  # one in company, two alone
    message = sim.answer(33)
    assert isinstance(message, Rejected)
    assert (message.code, message.index, message.attempt) == ("quarantined", 0, 3)
    for chunk in range(60):
        if chunk != 33:
            innocent = sim.answer(chunk)
            assert isinstance(innocent, Result)
            assert innocent.timings.num_retries == 1


def test_suspects_run_alone_with_nothing_else_in_flight(sim: Sim) -> None:
    for chunk in range(5):
        sim.submit(chunk, [[2 * chunk + 1], [2 * chunk + 2]])
    sim.fill()
    sim.submit(10, [[11]])
    sim.die()
    sim.submit(11, [[12]])
    for expected in range(1, 11):
        assert sim.fill() == 1
        assert sim.contents[-1] == [[expected]]
        sim.finish()
    sim.fill()
    assert sim.contents[-1] == [[11], [12]]  # the others waited meanwhile


def test_a_poison_row_takes_its_own_chunk_only_and_all_of_it(sim: Sim) -> None:
    sim.submit(1, [[1], [2, POISON], [3]])
    sim.submit(2, [[4], [5]])
    sim.run()
    message = sim.answer(1)
    assert isinstance(message, Rejected)
    assert (message.code, message.index) == ("quarantined", 1)
    assert sim.code(2) == "ok"


def test_a_convicted_sequence_is_refused_at_the_door_until_the_time_is_up() -> None:
    sim = Sim(quarantine_ttl_ms=60_000)
    sim.submit(1, [[POISON, 1]])
    sim.run()
    assert sim.code(1) == "quarantined"
    refused = sim.submit(2, [[1], [POISON, 1]])
    assert refused is not None
    assert (refused.code, refused.index) == ("quarantined", 1)
    assert sim.submit(3, [[1], [POISON + 10, 1]]) is None
    sim.run()
    assert sim.num_deaths == 3
    sim.now += 61
    assert sim.submit(4, [[POISON, 1]]) is None


def test_the_same_poison_waiting_in_the_pool_ends_no_more_ranks(sim: Sim) -> None:
    for chunk in range(5):
        sim.submit(chunk, [[POISON, 5]])
    sim.submit(5, [[1] * 60] * 5)
    for chunk in range(6, 30):
        sim.submit(chunk, [[POISON, 5], [7]])
    sim.run()
    assert sim.num_deaths == 3
    assert all(sim.code(chunk) == ("ok" if chunk == 5 else "quarantined") for chunk in range(30))


def test_news_of_a_conviction_come_once_and_travel(sim: Sim) -> None:
    other = Sim()
    sim.submit(1, [[POISON]])
    sim.run()
    news = sim.quarantine.take_news()
    assert len(news) == 1
    assert sim.quarantine.take_news() == []
    other.submit(1, [[POISON]])
    other.quarantine.accept(news, 60_000, other.now)
    other.quarantine.accept(news, 60_000, other.now)
    assert other.quarantine.take_news() == []  # told, not found: no echo
    other.run()
    assert other.code(1) == "quarantined"
    assert other.num_deaths == 0


def test_too_many_deaths_in_company_are_given_up(sim: Sim) -> None:
    sim.submit(1, [[1], [2], [3]], attempt=3)  # two replicas have tried before
    sim.fill()
    sim.die()
    message = sim.answer(1)
    assert isinstance(message, Rejected)
    assert (message.code, message.attempt) == ("lost", 4)
    assert message.retry_after_ms > 0
    assert sim.plan() is None or sim.plans[-1].canary


def test_kills_that_hit_different_rows_of_a_chunk_end_in_lost_not_quarantine(sim: Sim) -> None:
    sim.submit(1, [[1], [2], [3]])
    sim.fill()
    sim.die()  # in company
    sim.fill()
    sim.die()  # row 0 alone
    sim.fill()
    sim.finish()  # row 0 is cleared
    sim.fill()
    sim.die()  # row 1 alone
    assert sim.code(1) == "lost"
    assert len(sim.quarantine) == 0


def test_a_chunk_over_both_steps_in_flight_counts_one_death(sim: Sim) -> None:
    sim.submit(1, [[1] * 60] * 8)
    assert sim.fill() == 2
    sim.die()
    sim.run()
    message = sim.answer(1)
    assert isinstance(message, Result)
    assert message.timings.num_retries == 1


def test_a_suspect_that_nobody_waits_for_does_not_run(sim: Sim) -> None:
    sim.submit(1, [[1]])
    sim.submit(2, [[2]], timeout_ms=100)
    sim.submit(3, [[3]])
    sim.fill()
    sim.die()
    sim.abort(1)
    assert sim.code(1) == "aborted"
    sim.now += 0.2
    sim.run()
    assert (sim.code(2), sim.code(3)) == ("expired", "ok")
    assert sim.contents[1:] == [[[3]]]


def test_an_aborted_request_in_flight_at_a_death_is_answered_then(sim: Sim) -> None:
    sim.submit(1, [[1]])
    sim.fill()
    sim.abort(1)
    sim.die()
    assert sim.code(1) == "aborted"
    assert sim.fill() == 1  # a canary: the ranks are new
    assert sim.plans[-1].canary


def test_a_suspect_alone_at_an_ordered_stop_gets_no_strike(sim: Sim) -> None:
    sim.submit(1, [[1]])
    sim.fill()
    sim.die()
    for _ in range(5):
        sim.fill()
        sim.die(ordered=True)
    sim.run()
    assert sim.code(1) == "ok"


def test_a_suspect_that_does_not_fit_memory_is_told_so(sim: Sim) -> None:
    sim.submit(1, [[1] * 20])
    sim.submit(2, [[2]])
    sim.fill()
    sim.die()
    sim.oom_over = 10
    sim.run()
    assert (sim.code(1), sim.code(2)) == ("out_of_memory", "ok")


def test_a_poison_row_does_not_hold_up_work_for_ever(sim: Sim) -> None:
    """Poison keeps coming, each time another: every request is answered, good ones rightly."""
    for chunk in range(40):
        sim.submit(chunk, [[chunk + 1, POISON] if chunk % 8 == 0 else [chunk + 1]])
    sim.run()
    codes = {chunk: sim.code(chunk) for chunk in range(40)}
    assert {chunk for chunk, code in codes.items() if code == "ok"} == {c for c in range(40) if c % 8}
    assert set(codes.values()) == {"ok", "quarantined"}


def test_poison_of_clients_that_give_up_early_is_found_too(sim: Sim) -> None:
    """Each asks anew before the ranks are back, so no request of it ever lives to be tried alone twice."""
    for chunk in range(20):
        refused = sim.submit(chunk, [[9], [POISON, 3]])
        if refused is not None:
            assert refused.code == "quarantined"
            break
        sim.fill()
        sim.finish()  # the ranks die
        sim.abort(chunk)
        assert sim.code(chunk) in ("aborted", "quarantined")
    assert sim.num_deaths == 3
    assert sim.submit(100, [[POISON, 3]]) is not None


def test_a_suspect_that_comes_again_runs_alone_and_its_chunk_in_order_otherwise(sim: Sim) -> None:
    sim.submit(1, [[5]])
    sim.fill()
    sim.die()
    sim.abort(1)
    sim.submit(2, [[1], [5], [2], [5], [3]])
    sim.submit(3, [[5]])
    sim.run()
    assert [sim.code(chunk) for chunk in (2, 3)] == ["ok", "ok"]
    assert sim.contents[1:] == [[[5]], [[5]], [[5]], [[1], [2], [3]]]
    sim.submit(4, [[5], [6]])
    sim.run()
    assert sim.contents[-1] == [[5], [6]]  # cleared


def test_suspicion_is_bounded_and_ends() -> None:
    sim = Sim(facts(max_num_seqs=2), quarantine_ttl_ms=1000)
    sim.submit(1, [[5]])
    sim.fill()
    sim.die()
    sim.abort(1)
    sim.now += 1.5
    sim.submit(2, [[5], [6]])
    sim.fill()
    assert sim.contents[-1] == [[5], [6]]
    request = sim.planner._pool.find(GATEWAY, 2)
    assert isinstance(request, Request)
    for _ in range(2):
        for row in range(MAX_SUSPECTS + 10):
            sim.quarantine._count(row.to_bytes(16, "little"), 0, sim.now)
    assert len(sim.quarantine._suspects) == MAX_SUSPECTS


def test_the_quarantine_is_bounded_and_forgets() -> None:
    table = Quarantine(1000)
    table.accept([bytes([i % 256, i // 256]) * 8 for i in range(MAX_ENTRIES)], 10**9, now=0.0)
    table.accept([b"x" * 16], 500, now=0.5)
    assert len(table) == MAX_ENTRIES
    assert all(ttl <= 1000 for _, ttl in table.entries(0.0))  # nobody can ask for more than we would
    table.accept([b"x" * 16], 100, now=0.5)  # a shorter time does not shorten
    assert table.entries(1.0) == []
    assert len(table) == 0


def test_a_fingerprint_covers_ids_types_and_output() -> None:
    sim = Sim()
    found = set()
    for changes in ({}, {"type_starts": [1]}, {"type_starts": [2]}, {"spec": OutputSpec(dimensions=2)}):
        sim.submit(len(found), [[1, 2]], **changes)  # type: ignore[arg-type]
        request = sim.planner._pool.find(GATEWAY, len(found))
        assert isinstance(request, Request)
        found.add(fingerprint(request, 0))
    assert len(found) == 4
