"""The planner of encoders with a simulated clock: batching, the door, ends of requests, memory that runs out."""

import numpy as np
import pytest

from ipc.step import (
    DTYPE_CODES,
    POOLING_CODES,
    ROW_DIMENSIONS,
    ROW_DTYPE,
    ROW_NORMALIZE,
    ROW_OUTPUT_OFFSET,
    ROW_POOLING,
    ROW_TYPE_START,
    StepFailed,
    StepPlan,
    StepResult,
)
from ipc.submit import Rejected, Result, Submit
from ipc.types import OutputSpec, SamplingParams
from scheduler.request import Request
from tests.scheduler.sim import BAD, GATEWAY, NAN, Sim, facts


def test_waiting_requests_share_a_step() -> None:
    sim = Sim()
    for chunk in range(3):
        sim.submit(chunk, [[chunk + 1] * 5, [chunk + 1] * 7])
    plan = sim.plan()
    assert plan is not None
    assert (plan.num_seqs, plan.num_tokens, plan.kind, plan.canary) == (6, 36, "encode", False)
    sim.run()
    assert [sim.code(chunk) for chunk in range(3)] == ["ok"] * 3


def test_two_steps_are_in_flight_and_no_third() -> None:
    sim = Sim()
    for chunk in range(40):
        sim.submit(chunk, [[1] * 20])
    assert sim.fill() == 2
    sim.run()


def test_first_come_first_served() -> None:
    sim = Sim()
    for chunk in range(30):
        sim.submit(chunk, [[chunk + 1] * 10])
    sim.run()
    order = [row[0] for rows in sim.contents for row in rows]
    assert order == sorted(order)


def test_the_rows_of_one_chunk_may_go_into_different_steps() -> None:
    sim = Sim()
    sim.submit(1, [[row + 1] * 30 for row in range(9)])  # 270 tokens, 128 a step
    sim.run()
    assert [len(rows) for rows in sim.contents] == [4, 4, 1]
    message = sim.answer(1)
    assert isinstance(message, Result)
    assert message.timings.num_steps == 3
    assert message.timings.compute_ms == pytest.approx(3.0)


@pytest.mark.parametrize("rows", [[[1] * 3, [2] * 64], [[2] * 64, [1] * 3]], ids=["short-long", "long-short"])
def test_short_and_long_in_one_request(rows: list[list[int]]) -> None:
    sim = Sim(facts(max_num_batched_tokens=64))
    sim.submit(1, rows)
    sim.run()
    assert sim.code(1) == "ok"
    assert len(sim.plans) == 2


def test_cost_counts_the_quadratic_part() -> None:
    sim = Sim(facts(quadratic_tokens=64))  # a row of 64 costs 128: it fills a step alone
    sim.submit(1, [[1] * 64, [2] * 64, [3] * 2])
    sim.run()
    assert [len(rows) for rows in sim.contents] == [1, 1, 1]


def test_a_row_whose_cost_is_over_the_budget_runs_alone() -> None:
    sim = Sim(facts(quadratic_tokens=1))
    for chunk in range(4):
        sim.submit(chunk, [[1] * 64, [2]])
    sim.run()
    assert all(sim.code(chunk) == "ok" for chunk in range(4))


def test_an_item_larger_than_the_budget_is_refused_at_the_door() -> None:
    sim = Sim(facts(max_model_len=512))
    refused = sim.submit(1, [[1], [2] * 129])
    assert refused is not None
    assert (refused.code, refused.index) == ("invalid", 1)
    assert "1 to 128" in refused.message
    assert sim.plan() is not None  # nothing but a canary
    assert sim.plans[0].canary


def _refused(sim: Sim, frame: bytes, **changes: object) -> Rejected:
    fields = {"gateway": 1, "scheduler": 1, "chunk_id": 1, "lengths": [2, 3], "timeout_ms": 1000}
    request = Request.from_submit(Submit(**(fields | changes)), frame, sim.now)  # type: ignore[arg-type]
    refused = sim.planner.add(request, sim.now)
    assert refused is not None
    return refused


FRAME = np.arange(1, 6, dtype=np.int32).tobytes()


@pytest.mark.parametrize(
    ("frame", "changes", "code", "index"),
    [
        (FRAME, {"lengths": []}, "invalid", None),
        (FRAME, {"lengths": [5, 0]}, "invalid", 1),
        (FRAME, {"lengths": [65]}, "invalid", 0),
        (FRAME[:-1], {}, "invalid", None),
        (FRAME + b"\0\0\0\0", {}, "invalid", None),
        (b"", {}, "invalid", None),
        (np.asarray([1, 2, 3, -1, 5], np.int32).tobytes(), {}, "invalid", 1),
        (np.asarray([1, 1000, 3, 4, 5], np.int32).tobytes(), {}, "invalid", 0),
        (FRAME, {"type_starts": [1]}, "invalid", None),
        (FRAME, {"type_starts": [1, 4]}, "invalid", 1),
        (FRAME, {"spec": OutputSpec(dimensions=5)}, "invalid", None),
        (FRAME, {"spec": OutputSpec(dimensions=0)}, "invalid", None),
        (FRAME, {"spec": OutputSpec(all_tokens=True)}, "invalid", None),
        (FRAME, {"spec": OutputSpec(spans=((0, 1),))}, "invalid", None),
        (FRAME, {"sampling": SamplingParams()}, "invalid", None),
        (FRAME, {"timeout_ms": 0}, "expired", None),
    ],
)
def test_the_door(frame: bytes, changes: dict[str, object], code: str, index: int | None) -> None:
    sim = Sim()
    refused = _refused(sim, frame, **changes)
    assert (refused.code, refused.index) == (code, index)
    assert refused.message
    assert sim.stats.pending_requests == 0
    assert sim.submit(9, [[1, 2]]) is None  # a good one is still taken
    sim.run()
    assert sim.code(9) == "ok"


def test_a_scoring_model_takes_no_vector_options() -> None:
    sim = Sim(facts(task="score", dimension=1))
    assert _refused(sim, FRAME, spec=OutputSpec(dtype="int8")).code == "invalid"
    assert _refused(sim, FRAME, spec=OutputSpec(dimensions=1)).code == "invalid"


def test_the_pool_is_bounded_in_requests_and_in_tokens() -> None:
    sim = Sim(max_pending_requests=2, max_pending_tokens=50)
    assert sim.submit(1, [[1] * 20]) is None
    refused = sim.submit(2, [[1] * 31])
    assert refused is not None
    assert (refused.code, refused.retry_after_ms > 0) == ("full", True)
    assert sim.submit(3, [[1] * 20]) is None
    refused = sim.submit(4, [[1]])
    assert refused is not None
    assert refused.code == "full"
    never = sim.submit(5, [[1] * 51])
    assert never is not None
    assert never.code == "invalid"  # waiting would not help
    sim.run()
    assert sim.submit(6, [[1] * 50]) is None  # room again


def test_a_chunk_id_in_use_is_refused() -> None:
    sim = Sim()
    sim.submit(1, [[1]])
    refused = sim.submit(1, [[2]])
    assert refused is not None
    assert refused.code == "invalid"
    assert sim.submit(1, [[2]], gateway=8) is None  # another gateway's ids are its own


def test_rows_say_what_each_request_asked_for() -> None:
    sim = Sim()
    sim.submit(1, [[1, 2], [3]], type_starts=[1, 1])
    sim.submit(2, [[4]], spec=OutputSpec(pooling="cls", dtype="int8", dimensions=3, normalize=False))
    sim.submit(3, [[5], [6], [7]], spec=OutputSpec(dtype="binary", normalize=True))
    plan = sim.plan()
    assert plan is not None
    table = sim.slots[plan.slot]["rows"][: plan.num_seqs]
    assert table[:, ROW_TYPE_START].tolist() == [1, 1, -1, -1, -1, -1]
    assert table[:, ROW_POOLING].tolist() == [-1, -1, POOLING_CODES["cls"], -1, -1, -1]
    assert table[:, ROW_DTYPE].tolist() == [0, 0, DTYPE_CODES["int8"]] + [DTYPE_CODES["binary"]] * 3
    assert table[:, ROW_DIMENSIONS].tolist() == [-1, -1, 3, -1, -1, -1]
    assert table[:, ROW_NORMALIZE].tolist() == [-1, -1, 0, 1, 1, 1]
    assert table[:, ROW_OUTPUT_OFFSET].tolist() == [0, 16, 32, 36, 40, 44]  # each row begins on 4 bytes


def test_narrow_rows_come_back_without_gaps() -> None:
    sim = Sim()
    sim.submit(1, [[1], [2], [3]], spec=OutputSpec(dtype="int8", dimensions=3))
    plan = sim.plan()
    assert plan is not None
    arrays = sim.slots[plan.slot]
    arrays["values"][:12] = [1, 2, 3, 99, 4, 5, 6, 99, 7, 8, 9, 99]
    arrays["status"][:3] = 0
    (reply,) = sim.planner.apply(StepResult(1, plan.step), arrays, sim.now)
    assert isinstance(reply.message, Result)
    assert (reply.message.num_rows, reply.message.row_bytes) == (3, 3)
    assert bytes(reply.payload or b"") == bytes(range(1, 10))


def test_a_cancelled_request_is_answered_at_once_and_never_planned() -> None:
    sim = Sim()
    sim.submit(1, [[1]])
    sim.submit(2, [[2]])
    sim.abort(1)
    assert sim.code(1) == "aborted"
    sim.run()
    assert sim.contents == [[[2]]]
    sim.abort(1)  # once more: nothing
    sim.abort(99)
    assert len(sim.answers[GATEWAY, 1]) == 1


def test_a_request_cancelled_in_flight_is_answered_after_its_last_step() -> None:
    sim = Sim()
    sim.submit(1, [[1] * 60] * 5)  # two steps in flight, a row to go
    sim.fill()
    sim.abort(1)
    sim.abort(1)
    assert (GATEWAY, 1) not in sim.answers
    sim.finish()
    assert (GATEWAY, 1) not in sim.answers
    sim.finish()
    assert sim.code(1) == "aborted"
    assert len(sim.plans) == 2


def test_a_gateway_that_goes_takes_its_requests_with_it() -> None:
    sim = Sim()
    for chunk in range(4):
        sim.submit(chunk, [[1]], gateway=8)
    sim.submit(1, [[2]])
    sim.abort(None, gateway=8, reason="its gateway is gone")
    sim.run()
    assert [sim.code(chunk, gateway=8) for chunk in range(4)] == ["aborted"] * 4
    assert sim.code(1) == "ok"
    assert sim.contents == [[[2]]]


def test_an_expired_request_is_dropped_when_popped() -> None:
    sim = Sim()
    sim.submit(1, [[1]], timeout_ms=50)
    sim.submit(2, [[2]])
    sim.now += 0.06
    sim.run()
    assert (sim.code(1), sim.code(2)) == ("expired", "ok")
    assert sim.contents == [[[2]]]


def test_a_request_that_expires_between_its_steps_is_not_continued() -> None:
    sim = Sim(facts(num_steps_in_flight=1))
    sim.submit(1, [[1] * 60] * 6, timeout_ms=50)
    sim.fill()
    sim.now += 0.06
    sim.run()
    assert sim.code(1) == "expired"
    assert len(sim.plans) == 1


@pytest.mark.parametrize(("token", "code"), [(BAD, "invalid"), (NAN, "non_finite")])
def test_a_bad_row_fails_its_chunk_alone(token: int, code: str) -> None:
    sim = Sim()
    sim.submit(1, [[1]])
    sim.submit(2, [[2], [3, token], [4]])
    sim.submit(3, [[5]])
    sim.run()
    message = sim.answer(2)
    assert isinstance(message, Rejected)
    assert (message.code, message.index) == (code, 1)
    assert (sim.code(1), sim.code(3)) == ("ok", "ok")


def test_a_chunk_with_a_bad_row_is_answered_after_its_last_step() -> None:
    sim = Sim()
    sim.submit(1, [[NAN] * 60, [1] * 60, [2] * 60, [3] * 60, [4] * 60])
    sim.fill()
    sim.finish()
    assert (GATEWAY, 1) not in sim.answers
    sim.finish()
    assert sim.code(1) == "non_finite"
    assert len(sim.plans) == 2  # its last row was never sent


def test_out_of_memory_halves_the_batch() -> None:
    sim = Sim(facts(num_steps_in_flight=1), canary_interval_ms=10**9)
    sim.oom_over = 70
    for chunk in range(8):
        sim.submit(chunk, [[chunk + 1] * 16])
    sim.run()
    assert all(sim.code(chunk) == "ok" for chunk in range(8))
    assert [len(rows) for rows in sim.contents[:2]] == [8, 4]
    order = [
        row[0] for plan, rows in zip(sim.plans, sim.contents, strict=True) for row in rows if plan.num_tokens <= 70
    ]
    assert order == list(range(1, 9))


def test_out_of_memory_alone_is_the_end_of_that_request_only() -> None:
    sim = Sim()
    sim.oom_over = 50
    sim.submit(1, [[1] * 20])
    sim.submit(2, [[2] * 20, [3] * 60])
    sim.submit(3, [[4] * 20])
    sim.run()
    assert (sim.code(1), sim.code(3)) == ("ok", "ok")
    message = sim.answer(2)
    assert isinstance(message, Rejected)
    assert (message.code, message.index) == ("out_of_memory", 1)


def test_after_out_of_memory_batches_grow_again() -> None:
    sim = Sim(canary_interval_ms=10**9)
    sim.oom_over = 100
    sim.submit(0, [[1] * 8] * 16)
    sim.run()
    sim.oom_over = 1 << 30
    for chunk in range(1, 40):
        sim.submit(chunk, [[1] * 8] * 4)
    sim.run()
    assert len(sim.contents[-2]) == 16
    assert all(sim.code(chunk) == "ok" for chunk in range(40))


def test_a_result_for_an_unknown_step_is_counted_and_dropped() -> None:
    sim = Sim()
    sim.submit(1, [[1]])
    sim.fill()
    assert sim.planner.apply(StepResult(1, 99), sim.slots[0], sim.now) == []
    assert sim.planner.apply(StepFailed(1, 99, "oom"), sim.slots[0], sim.now) == []
    assert sim.stats.stale["rank"] == 2
    sim.run()
    assert sim.code(1) == "ok"


def test_a_canary_runs_when_idle_and_only_then() -> None:
    sim = Sim(canary_interval_ms=5000)
    first = sim.plan()
    assert first is not None
    assert first.canary
    assert (first.num_seqs, first.num_tokens) == (1, 1)
    assert sim.plan() is None  # one at a time
    sim.finish()
    assert sim.stats.last_forward == sim.now
    sim.now += 4.9
    assert sim.plan() is None
    sim.submit(1, [[1]])
    plan = sim.plan()
    assert plan is not None
    assert not plan.canary
    sim.finish()
    sim.now += 4.9
    assert sim.plan() is None
    sim.now += 0.2
    again = sim.plan()
    assert again is not None
    assert again.canary
    assert sim.answers.keys() == {(GATEWAY, 1)}  # nobody is told of canaries


def test_idle_steps_run_while_ranks_have_use_for_them() -> None:
    sim = Sim(canary_interval_ms=10**9)
    planner = sim.planner

    def answer(plan: StepPlan, idle_work: bool) -> None:
        planner.apply(StepResult(1, plan.step, 5, idle_work), sim.slots[plan.slot], sim.now)

    canary, _ = planner.plan(sim.now, 0, sim.slots[0])
    assert canary is not None
    answer(canary, idle_work=True)
    idle, _ = planner.plan(sim.now, 0, sim.slots[0])
    assert idle is not None
    assert (idle.kind, idle.num_seqs) == ("idle", 0)
    assert planner.plan(sim.now, 1, sim.slots[1])[0] is None  # one at a time
    answer(idle, idle_work=True)
    sim.submit(1, [[3, 4], [5]])
    work, _ = planner.plan(sim.now, 0, sim.slots[0])
    assert work is not None
    assert (work.kind, work.num_seqs) == ("encode", 2)  # requests come first
