"""Interactive and bulk work in one planner: who gets how much of each step, and nobody starves."""

import pytest

from tests.scheduler.sim import Sim, facts

INTERACTIVE, BULK = 1, 2


def _steps(sim: Sim, num_steps: int, interactive: list[int] | None, bulk: list[int] | None) -> list[tuple[int, int]]:
    """Tokens (interactive, bulk) of each step while more of both than fits keeps coming."""
    chunk = 10_000
    shares: list[tuple[int, int]] = []
    waiting = {INTERACTIVE: 0, BULK: 0}
    seen = 0
    while len(shares) < num_steps:
        for kind, lengths in ((INTERACTIVE, interactive), (BULK, bulk)):
            while lengths is not None and waiting[kind] < 4 * sim.facts.max_num_batched_tokens:
                chunk += 1
                sim.submit(chunk, [[kind] * n for n in lengths], priority="bulk" if kind == BULK else "interactive")
                waiting[kind] += sum(lengths)
        sim.fill()
        for rows in sim.contents[seen:]:
            for row in rows:
                waiting[row[0]] -= len(row)
        seen = len(sim.contents)
        rows = sim.contents[len(shares)]
        taken = [sum(len(row) for row in rows if row[0] == kind) for kind in (INTERACTIVE, BULK)]
        shares.append((taken[0], taken[1]))
        sim.now += 0.001
        sim.finish()
    return shares


@pytest.fixture
def sim() -> Sim:
    """Bulk never moves up, and no canaries: what is seen is the share alone."""
    return Sim(facts(max_num_seqs=128), bulk_wait_ms=10**9, canary_interval_ms=10**9)


def test_interactive_goes_first(sim: Sim) -> None:
    for chunk in range(20):
        sim.submit(chunk, [[BULK] * 10], priority="bulk")
    sim.submit(100, [[INTERACTIVE] * 10])
    sim.fill()
    assert sim.contents[0][0] == [INTERACTIVE] * 10


def test_bulk_keeps_its_share_of_every_step(sim: Sim) -> None:
    shares = _steps(sim, 50, interactive=[4], bulk=[4])
    assert all(bulk >= 12 for _, bulk in shares[1:]), shares  # 10 % of 128, in rows of 4
    assert sum(i for i, _ in shares) > 4 * sum(b for _, b in shares)


def test_bulk_rows_larger_than_the_share_get_their_turn(sim: Sim) -> None:
    shares = _steps(sim, 60, interactive=[4], bulk=[64])
    assert sum(bulk for _, bulk in shares) >= 0.09 * sum(i + b for i, b in shares)
    assert sum(interactive for interactive, _ in shares) >= 0.75 * sum(i + b for i, b in shares)


def test_bulk_as_large_as_a_step_does_not_starve_and_starves_nobody() -> None:
    sim = Sim(facts(max_num_batched_tokens=64), bulk_wait_ms=10**9, canary_interval_ms=10**9)
    shares = _steps(sim, 100, interactive=[64], bulk=[64])
    assert 8 <= sum(bulk > 0 for _, bulk in shares) <= 25
    assert sum(interactive > 0 for interactive, _ in shares) >= 75


def test_interactive_rows_as_large_as_a_step_do_not_starve_behind_small_bulk() -> None:
    sim = Sim(facts(max_num_batched_tokens=64), bulk_wait_ms=10**9, canary_interval_ms=10**9)
    shares = _steps(sim, 100, interactive=[64], bulk=[4] * 16)
    assert sum(interactive > 0 for interactive, _ in shares) >= 75
    assert sum(bulk for _, bulk in shares) >= 0.08 * 64 * 100


def test_bulk_keeps_a_row_when_sequences_and_not_tokens_are_scarce() -> None:
    sim = Sim(facts(max_num_seqs=8), bulk_wait_ms=10**9, canary_interval_ms=10**9)
    shares = _steps(sim, 50, interactive=[1], bulk=[1])
    assert all(bulk >= 1 for _, bulk in shares[1:])


def test_one_sequence_a_step_still_serves_both() -> None:
    sim = Sim(facts(max_num_seqs=1), bulk_wait_ms=10**9, canary_interval_ms=10**9)
    shares = _steps(sim, 100, interactive=[40], bulk=[40])
    assert sum(bulk > 0 for _, bulk in shares) >= 2
    assert sum(interactive > 0 for interactive, _ in shares) >= 75


def test_bulk_alone_takes_everything(sim: Sim) -> None:
    shares = _steps(sim, 5, interactive=None, bulk=[8])
    assert shares == [(0, 128)] * 5


def test_nothing_is_kept_for_bulk_that_is_not_there(sim: Sim) -> None:
    shares = _steps(sim, 5, interactive=[8], bulk=None)
    assert shares == [(128, 0)] * 5


def test_what_bulk_leaves_goes_to_interactive(sim: Sim) -> None:
    for chunk in range(40):
        sim.submit(chunk, [[INTERACTIVE] * 8])
    sim.submit(100, [[BULK] * 2], priority="bulk")
    sim.fill()
    assert sum(len(row) for row in sim.contents[0]) >= 122
    assert [BULK] * 2 in sim.contents[0]


def test_bulk_that_waited_gets_a_step_of_its_own_now_and_then() -> None:
    sim = Sim(bulk_share=0.0, bulk_wait_ms=2000, canary_interval_ms=10**9)
    for chunk in range(10, 14):
        sim.submit(chunk, [[INTERACTIVE] * 60] * 4)
    for chunk in range(3):
        sim.submit(chunk, [[BULK + chunk] * 60] * 4, priority="bulk", gateway=8)
    shares: list[list[int]] = []
    for step in range(60):
        for _ in range(2):  # as much as fits, so that nothing is left over
            sim.submit(100 + len(sim.rows), [[INTERACTIVE] * 60])
        sim.fill()
        shares.append([row[0] for row in sim.contents[step]])
        sim.now += 0.25
        sim.finish()
    first = [next(i for i, rows in enumerate(shares) if BULK + chunk in rows) for chunk in range(3)]
    assert first == sorted(first)
    assert first[0] >= 8  # not before two seconds
    assert len(set(first)) == 3  # and not all at once


def test_bulk_that_waited_keeps_its_share_behind_a_long_interactive_queue() -> None:
    sim = Sim(bulk_wait_ms=2000, canary_interval_ms=10**9)
    for chunk in range(10, 210):
        sim.submit(chunk, [[INTERACTIVE] * 8])
    sim.submit(1, [[BULK] * 8] * 4, priority="bulk")
    sim.now += 3.0  # nothing of it has run yet
    for _ in range(5):
        sim.fill()
        sim.now += 0.1
        sim.finish()
    assert [message.num_rows for message, _ in sim.answers[7, 1]] == [4]  # each row once
    rows = [row for step in sim.contents for row in step]
    assert rows.count([BULK] * 8) == 4
    assert len(sim.answers) < 100  # while most of the interactive ones still wait


def test_a_query_waits_for_its_own_step_only_however_long_bulk_has_waited() -> None:
    sim = Sim(bulk_wait_ms=2000, canary_interval_ms=10**9)
    for chunk in range(40):
        sim.submit(chunk, [[BULK] * 12] * 64, priority="bulk")
    for query in range(100, 140):
        sim.fill()
        sim.submit(query, [[INTERACTIVE] * 2])
        sim.now += 0.15
        sim.finish()
        sim.fill()
        assert [INTERACTIVE] * 2 in sim.contents[-1]


def test_bulk_that_waited_is_given_up_once_when_its_deadline_passes() -> None:
    sim = Sim(bulk_share=0.0, bulk_wait_ms=10**9, canary_interval_ms=10**9)
    sim.submit(1, [[BULK] * 8], priority="bulk", timeout_ms=3000)
    for chunk in range(10, 50):
        sim.submit(chunk, [[INTERACTIVE] * 64] * 2)
    for _ in range(6):
        sim.fill()
        sim.now += 1.0
        sim.finish()
    assert [message.code for message, _ in sim.answers[7, 1]] == ["expired"]


def test_bulk_that_waited_survives_the_death_of_its_step_without_a_share() -> None:
    sim = Sim(bulk_share=0.0, bulk_wait_ms=2000, canary_interval_ms=10**9)
    for chunk in range(10, 16):
        sim.submit(chunk, [[INTERACTIVE] * 64] * 2)
    sim.submit(1, [[BULK] * 8], priority="bulk")
    sim.now += 3.0
    for _ in range(30):
        sim.submit(1000 + len(sim.rows), [[INTERACTIVE] * 64] * 2)
        sim.fill()
        if any([BULK] * 8 in step for step in sim.contents) and sim.epoch == 1:
            sim.die(ordered=True)
        else:
            sim.now += 0.1
            sim.finish()
    assert sim.epoch == 2
    assert [message.num_rows for message, _ in sim.answers[7, 1]] == [1]


def test_credit_is_forgotten_when_bulk_is_gone() -> None:
    sim = Sim(facts(max_num_batched_tokens=64), bulk_wait_ms=10**9, canary_interval_ms=10**9)
    for chunk in range(40):
        sim.submit(chunk, [[INTERACTIVE] * 64])

    def first_bulk_step(chunk: int) -> int:
        before = len(sim.contents)
        sim.submit(chunk, [[BULK] * 64], priority="bulk")
        for _ in range(20):
            sim.fill()
            if any(rows[0][0] == BULK for rows in sim.contents[before:]):
                break
            sim.finish()
        return len(sim.contents) - before

    assert first_bulk_step(100) >= 9  # it saved for its turn
    for _ in range(6):
        sim.fill()
        sim.finish()
    assert first_bulk_step(101) >= 9  # and has to save again


def test_credit_saved_by_cancelled_work_is_nobodys() -> None:
    sim = Sim(facts(max_num_batched_tokens=64), bulk_wait_ms=10**9, canary_interval_ms=10**9)
    for chunk in range(40):
        sim.submit(chunk, [[INTERACTIVE] * 64])
    sim.submit(100, [[BULK] * 64], priority="bulk")
    for _ in range(7):
        sim.fill()
        sim.finish()
    sim.abort(100)
    sim.fill()
    sim.finish()
    sim.submit(101, [[BULK] * 64], priority="bulk")
    for _ in range(6):
        sim.fill()
        sim.finish()
    assert all(rows[0][0] == INTERACTIVE for rows in sim.contents)
