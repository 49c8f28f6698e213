"""Every request gets exactly one terminal reply, and a right one, whatever happens: thousands of random steps."""

import random

import pytest

from ipc.submit import Rejected
from ipc.types import OutputSpec
from tests.scheduler.sim import BAD, NAN, POISON, Sim, facts

GATEWAYS = (1, 2, 3)


class Chaos:
    """Random work, random faults; counts what was taken so that nothing can go missing."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        model = facts(
            num_steps_in_flight=self.random.choice([1, 2, 3]),
            quadratic_tokens=self.random.choice([32, 1 << 62]),
            max_num_seqs=self.random.choice([1, 4, 16]),
        )
        self.sim = Sim(
            model,
            max_pending_requests=40,
            max_pending_tokens=2000,
            bulk_wait_ms=200,
            quarantine_ttl_ms=500,
            canary_interval_ms=100,
        )
        self.taken: set[tuple[int, int]] = set()
        self.next_chunk = 0

    def act(self) -> None:
        sim, pick = self.sim, self.random
        sim.now += pick.choice([0.0, 0.001, 0.05])
        action = pick.choices(
            ["submit", "plan", "finish", "abort", "gateway", "die", "stop", "memory"], [40, 25, 30, 4, 0.3, 0.7, 0.7, 1]
        )[0]
        if action == "submit":
            self.submit()
        elif action == "plan":
            sim.plan()
        elif action == "finish" and sim.flying:
            sim.finish()
        elif action == "abort" and self.taken:
            gateway, chunk = pick.choice(sorted(self.taken))
            sim.abort(chunk, gateway)
        elif action == "gateway":
            sim.abort(None, pick.choice(GATEWAYS), "its gateway is gone")
        elif action in ("die", "stop"):
            sim.die(ordered=action == "stop")
        elif action == "memory":
            sim.oom_over = pick.choice([20, 40, 90, 1 << 30, 1 << 30, 1 << 30])

    def submit(self) -> None:
        pick = self.random
        rows = [[pick.randrange(600)] * pick.choice([1, 3, 10, 30, 64]) for _ in range(pick.choice([1, 1, 2, 5, 12]))]
        special = pick.random()
        if special < 0.01:
            rows[pick.randrange(len(rows))][0] = POISON
        elif special < 0.03:
            rows[pick.randrange(len(rows))][0] = pick.choice([BAD, NAN])
        gateway = pick.choice(GATEWAYS)
        self.next_chunk += 1
        refused = self.sim.submit(
            self.next_chunk,
            rows,
            gateway,
            priority=pick.choice(["interactive", "interactive", "bulk"]),
            timeout_ms=pick.choice([20, 1000, 10**6]),
            spec=OutputSpec(normalize=pick.choice([None, True])),
        )
        if refused is None:
            self.taken.add((gateway, self.next_chunk))
        else:
            assert refused.code in ("full", "quarantined", "expired")

    def check(self) -> None:
        sim = self.sim
        waiting = self.taken - sim.answers.keys()
        assert sim.answers.keys() <= self.taken
        assert sim.stats.pending_requests == len(waiting)
        assert sim.stats.pending_tokens == sum(len(row) for key in waiting for row in sim.rows[key])
        assert sim.stats.steps_in_flight == len(sim.flying)

    def settle(self) -> dict[str, int]:
        """Ends all and checks every answer; returns how often each code came."""
        self.sim.oom_over = 1 << 30
        self.sim.run()
        while self.sim.flying:
            self.sim.finish()
        self.check()
        codes: dict[str, int] = {}
        for gateway, chunk in self.taken:
            message = self.sim.answer(chunk, gateway)  # one, and right
            code = message.code if isinstance(message, Rejected) else "ok"
            codes[code] = codes.get(code, 0) + 1
        pool = self.sim.planner._pool
        assert not list(pool)
        assert not any(pool._queues.values())
        return codes


@pytest.mark.parametrize("seed", range(16))
def test_exactly_one_right_answer(seed: int) -> None:
    chaos = Chaos(seed)
    for step in range(4000):
        chaos.act()
        if step % 50 == 0:
            chaos.check()
    codes = chaos.settle()
    assert codes["ok"] > 30
    assert {"aborted", "expired"} <= codes.keys()


def test_the_chaos_meets_every_end() -> None:
    """Or the test above would say little."""
    wanted = {"ok", "aborted", "expired", "invalid", "non_finite", "out_of_memory", "lost", "quarantined"}
    met: set[str] = set()
    for seed in range(100, 160):
        chaos = Chaos(seed)
        for _ in range(2500):
            chaos.act()
        met |= chaos.settle().keys()
        if met >= wanted:
            return
    raise AssertionError(f"never met: {wanted - met}")
