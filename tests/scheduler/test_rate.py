"""The measured rate, and the refusal of work whose deadline would pass while it waits."""

import pytest

from ipc.submit import Rejected
from scheduler.embedding.rate import Rate
from tests.scheduler.sim import Sim

STEP_S = 0.1
ROWS = [[1] * 32] * 4  # fills a step of the simulation: 128 tokens


def _busy(**config: object) -> Sim:
    """Has computed full steps for two seconds, 1280 tokens/s; 20 requests wait."""
    sim = Sim(canary_interval_ms=10**9, **config)
    for chunk in range(40):
        sim.submit(chunk, ROWS)
    for _ in range(20):
        sim.fill()
        sim.now += STEP_S
        sim.finish()
    return sim


def test_the_rate_is_that_of_steps_that_left_work_waiting() -> None:
    rate = Rate()
    assert rate.seconds_for(10**9) == 0.0  # unknown
    for step in range(20):  # two in flight
        rate.step_finished(100, (step - 2) * STEP_S, step * STEP_S, full=step > 0)
    assert rate.seconds_for(1000) == pytest.approx(1.0)
    rate.step_finished(1, 99.0, 99.5, full=False)
    rate.step_finished(100, 200.0, 200.1, full=True)  # the pause before is not counted
    assert rate.seconds_for(1000) == pytest.approx(1.0)


def test_work_that_would_wait_past_its_deadline_is_refused_at_once() -> None:
    sim = _busy()
    assert sim.submit(100, ROWS, timeout_ms=10_000) is None
    refused = sim.submit(101, ROWS, timeout_ms=1_000)
    assert isinstance(refused, Rejected)
    assert refused.code == "full"
    assert 1_000 <= refused.retry_after_ms <= 1_200  # 21 requests are 2.1 s
    assert sim.stats.requests["full"] == 1
    sim.run()
    assert sim.submit(102, ROWS, timeout_ms=200) is None  # nothing waits any more


def test_a_query_is_not_refused_for_bulk_that_it_does_not_wait_for() -> None:
    sim = _busy()
    sim.run()
    for chunk in range(200, 300):
        assert sim.submit(chunk, ROWS, priority="bulk") is None
    assert sim.submit(300, [[2] * 4], timeout_ms=1_000) is None
    assert isinstance(sim.submit(301, ROWS, timeout_ms=1_000, priority="bulk"), Rejected)


def test_nothing_is_refused_while_the_rate_is_unknown() -> None:
    sim = Sim(canary_interval_ms=10**9)
    for chunk in range(1000):
        assert sim.submit(chunk, ROWS, timeout_ms=1) is None
