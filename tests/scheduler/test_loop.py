"""The scheduler's loop and links end to end: real sockets, a real ring, fake ranks in processes of their own."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from ipc import addresses
from ipc.codec import encode
from ipc.control import Drain, Heartbeat, Hello, ProcessStats, Quarantine
from ipc.sockets import EndpointInUse, PeerFull, dealer
from ipc.step import StepFailed, StepResult
from ipc.submit import Rejected, Result
from scheduler import loop
from scheduler.config import SchedulerConfig
from scheduler.loop import serve
from tests.scheduler.stack import REPLICA, HandGateway, Stack, expected, stack

DIE, HANG, NAN = 6001, 6002, 6003


async def test_one_submit_gets_one_result() -> None:
    async with stack() as made:
        made.scheduler()
        made.rank()
        gateway = made.gateway()
        status = await gateway.ready()
        assert status.facts is not None
        assert status.facts.dimension == 384
        rows = [[101, 5, 6, 102], [101, 7, 102]]
        assert np.array_equal(await gateway.embed(1, rows), expected(rows))
        assert len(gateway.outcomes[1]) == 1


async def test_many_chunks_of_two_gateways_at_once() -> None:
    async with stack() as made:
        made.scheduler()
        made.rank(latency_ms=1)
        first, second = made.gateway(), made.gateway()
        await first.ready()
        await second.ready()
        for chunk in range(200):
            await first.submit(chunk, [[chunk + 1, 2]])
            await second.submit(chunk, [[chunk + 1, 3]] * 3)
        for chunk in range(200):
            one, two = await first.outcome(chunk), await second.outcome(chunk)
            assert one[1] == expected([[chunk + 1, 2]]).tobytes()
            assert two[1] == expected([[chunk + 1, 3]] * 3).tobytes()
        assert made.schedulers[0].stats.num_steps < 400  # they shared steps


async def test_what_a_request_carries_is_validated_and_the_rest_goes_on() -> None:
    async with stack() as made:
        made.scheduler()
        made.rank(nan_on=NAN)
        gateway = made.gateway()
        await gateway.ready()
        await gateway.submit(1, [[1, 2], [5, NAN]])
        await gateway.submit(2, [[1, 99_999]])
        await gateway.submit(3, [[1, 2]], lengths=[3])
        codes = []
        for chunk in (1, 2, 3):
            message, _ = await gateway.outcome(chunk)
            assert isinstance(message, Rejected)
            codes.append((message.code, message.index))
        assert codes == [("non_finite", 1), ("invalid", 0), ("invalid", None)]
        assert np.array_equal(await gateway.embed(4, [[1, 2]]), expected([[1, 2]]))


async def test_a_submit_for_another_life_of_the_scheduler_is_stale() -> None:
    async with stack() as made:
        made.scheduler()
        made.rank()
        gateway = made.gateway()
        await gateway.ready()
        await gateway.submit(1, [[1]], scheduler=12345, attempt=2)
        message, _ = await gateway.outcome(1)
        assert isinstance(message, Rejected)
        assert (message.code, message.attempt) == ("stale", 2)


async def test_without_a_rank_work_is_refused_and_with_a_lost_one_it_waits() -> None:
    async with stack() as made:
        made.scheduler()
        gateway = made.gateway()
        await gateway.until(lambda: gateway.statuses)
        assert gateway.statuses[-1].state == "starting"
        await gateway.submit(1, [[1]])
        message, _ = await gateway.outcome(1)
        assert isinstance(message, Rejected)
        assert (message.code, message.retry_after_ms > 0) == ("not_ready", True)
        process = made.rank()
        await gateway.ready()
        process.kill()
        await gateway.until(lambda: gateway.statuses[-1].state == "starting")
        await gateway.submit(2, [[2]])
        made.rank()
        assert (await gateway.outcome(2))[1] == expected([[2]]).tobytes()


async def test_a_rank_killed_with_work_in_flight_costs_a_retry() -> None:
    async with stack() as made:
        made.scheduler()
        process = made.rank(latency_ms=10_000)
        gateway = made.gateway()
        await gateway.ready()
        for chunk in range(5):
            await gateway.submit(chunk, [[chunk + 1], [chunk + 7]])
        await gateway.until(lambda: made.schedulers[0].stats.steps_in_flight == 2)
        process.kill()
        made.rank()
        for chunk in range(5):
            message, payload = await gateway.outcome(chunk)
            assert isinstance(message, Result)
            assert payload == expected([[chunk + 1], [chunk + 7]]).tobytes()
        assert made.schedulers[0].stats.num_deaths == 1
        assert not gateway.quarantines


async def test_work_that_only_waits_is_given_back_when_the_ranks_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "RANKS_BACK_S", 0.3)
    async with stack() as made:
        scheduler = made.scheduler()
        process = made.rank(latency_ms=10_000)
        gateway = made.gateway()
        await gateway.ready()
        for chunk in range(3):  # the first in flight, beside a canary or the second
            await gateway.submit(chunk, [[chunk + 1]], attempt=2)
            await gateway.until(lambda chunk=chunk: scheduler.stats.pending_requests == chunk + 1)
        await gateway.until(lambda: scheduler.stats.steps_in_flight == 2)
        process.kill()
        message, _ = await gateway.outcome(2)
        assert isinstance(message, Rejected)
        assert (message.code, message.attempt) == ("not_ready", 2)  # which counts as no attempt
        await gateway.submit(3, [[4]])
        message, _ = await gateway.outcome(3)
        assert isinstance(message, Rejected)
        assert message.code == "not_ready"
        assert 0 not in gateway.outcomes
        made.rank()  # a suspect stays: no other replica should meet it
        assert (await gateway.outcome(0))[1] == expected([[1]]).tobytes()


async def test_a_poison_row_is_found_told_and_refused() -> None:
    async with stack() as made:
        made.scheduler()
        made.supervised_rank(die_on=DIE)
        gateway, other = made.gateway(), made.gateway()
        await gateway.ready()
        await other.ready()
        for chunk in range(10):
            await gateway.submit(chunk, [[chunk + 1], [chunk + 20, DIE]] if chunk == 4 else [[chunk + 1]])
        for chunk in range(10):
            message, payload = await gateway.outcome(chunk)
            if chunk == 4:
                assert isinstance(message, Rejected)
                assert (message.code, message.index) == ("quarantined", 1)
            else:
                assert payload == expected([[chunk + 1]]).tobytes()
        await other.until(lambda: other.quarantines)
        assert other.quarantines[0] == gateway.quarantines[0]
        await other.submit(99, [[24, DIE]])
        message, _ = await other.outcome(99)
        assert isinstance(message, Rejected)
        assert message.code == "quarantined"
        assert made.schedulers[0].stats.num_deaths == 3
        late = made.gateway()  # learns of it when it comes
        await late.until(lambda: late.quarantines)
        assert late.quarantines[0].fingerprints == gateway.quarantines[0].fingerprints


async def test_a_fault_in_the_model_is_a_death() -> None:
    async with stack() as made:
        made.scheduler()
        made.supervised_rank(fault_on=DIE)
        gateway = made.gateway()
        await gateway.ready()
        await gateway.submit(1, [[1, DIE]])
        message, _ = await gateway.outcome(1)
        assert isinstance(message, Rejected)
        assert message.code == "quarantined"
        assert made.schedulers[0].stats.step_failures["fatal"] == 3


async def test_quarantine_told_by_a_gateway_is_kept_and_not_echoed() -> None:
    async with stack() as made:
        scheduler = made.scheduler()
        made.rank()
        gateway = made.gateway()
        await gateway.ready()
        await gateway.send(Quarantine([b"f" * 16], 60_000))
        await gateway.until(lambda: len(scheduler.quarantine))
        assert np.array_equal(await gateway.embed(1, [[1]]), expected([[1]]))
        assert not gateway.quarantines


async def test_out_of_memory_is_met_with_smaller_steps() -> None:
    async with stack() as made:
        made.scheduler()
        made.rank(oom_over=20)
        gateway = made.gateway()
        await gateway.ready()
        await gateway.submit(1, [[i + 1] * 8 for i in range(10)])
        await gateway.submit(2, [[1], [2] * 30])
        assert (await gateway.outcome(1))[1] == expected([[i + 1] * 8 for i in range(10)]).tobytes()
        message, _ = await gateway.outcome(2)
        assert isinstance(message, Rejected)
        assert (message.code, message.index) == ("out_of_memory", 1)


async def test_a_rank_that_takes_too_long_for_a_step_is_killed() -> None:
    async with stack() as made:
        made.scheduler(step_deadline_ms=300)
        process = made.rank(hang_on=HANG)
        gateway = made.gateway()
        await gateway.ready()
        await gateway.submit(1, [[1, HANG]])
        assert await made.ended(process) == -signal.SIGKILL
        made.rank()  # does not hang on it
        assert (await gateway.outcome(1))[1] == expected([[1, HANG]]).tobytes()


async def test_a_rank_that_takes_too_long_to_load_is_killed() -> None:
    async with stack() as made:
        made.scheduler(load_deadline_ms=300)
        process = made.rank(load_ms=20_000)
        assert await made.ended(process) == -signal.SIGKILL


async def test_a_rank_that_never_says_hello_is_ended_and_no_other() -> None:
    async with stack() as made:
        made.scheduler(2, hello_deadline_ms=500)
        gateway = made.gateway()
        made.rank(0)
        await gateway.until(lambda: made.logged("rank_hello"))
        made.ended_ranks.clear()  # of a start on a busy machine
        await gateway.until(lambda: len(made.ended_ranks) > 1)
        assert set(made.ended_ranks) == {1}
        made.rank(1)
        await gateway.ready()
        made.ended_ranks.clear()
        await asyncio.sleep(1)
        assert made.ended_ranks == []


async def test_an_idle_rank_that_falls_silent_is_killed() -> None:
    async with stack() as made:
        made.scheduler(rank_heartbeat_ms=4000, canary_interval_ms=10**6)
        process = made.rank()
        gateway = made.gateway()
        await gateway.ready()
        await asyncio.sleep(5)
        assert process.poll() is None  # its heartbeats are heard
        process.send_signal(signal.SIGSTOP)
        assert await made.ended(process) == -signal.SIGKILL


async def test_an_idle_replica_proves_itself_by_canaries() -> None:
    async with stack() as made:
        scheduler = made.scheduler(canary_interval_ms=100)
        made.rank()
        gateway = made.gateway()
        await gateway.ready()
        await gateway.until(lambda: scheduler.stats.num_canaries >= 3)
        assert 0 <= gateway.statuses[-1].forward_age_ms < 5000
        assert not gateway.outcomes


async def test_a_canary_that_comes_out_as_nan_is_logged_and_no_proof() -> None:
    async with stack() as made:
        scheduler = made.scheduler(canary_interval_ms=100)
        made.rank(nan_on=0)  # the canary's token
        gateway = made.gateway()
        await gateway.ready()
        await gateway.until(lambda: len(made.logged("canary_failed")) >= 2)
        assert "not finite" in str(made.logged("canary_failed")[0]["reason"])
        assert scheduler.status().forward_age_ms == -1


async def test_an_ordered_stop_of_a_rank_finishes_its_steps() -> None:
    async with stack() as made:
        scheduler = made.scheduler()
        process = made.rank(latency_ms=300)
        gateway = made.gateway()
        await gateway.ready()
        for chunk in range(3):
            await gateway.submit(chunk, [[chunk + 1]])
        await gateway.until(lambda: scheduler.stats.steps_in_flight == 2)
        process.terminate()
        await gateway.until(lambda: gateway.statuses[-1].state == "starting")  # told before the rank has left
        assert scheduler.stats.steps_in_flight == 2
        assert await made.ended(process) == 0
        await gateway.submit(3, [[4]])
        made.rank()
        for chunk in range(4):
            message, payload = await gateway.outcome(chunk)
            assert isinstance(message, Result)
            assert message.timings.num_retries == 0
            assert payload == expected([[chunk + 1]]).tobytes()
        assert scheduler.stats.num_deaths == 0


async def test_the_next_scheduler_keeps_the_ranks_of_the_last() -> None:
    async with stack() as made:
        first = made.scheduler()
        process = made.rank()
        gateway = made.gateway()
        await gateway.ready()
        assert np.array_equal(await gateway.embed(1, [[1]]), expected([[1]]))
        made.stop_scheduler(first)
        second = made.scheduler()
        await gateway.until(lambda: gateway.scheduler == second.incarnation and gateway.statuses[-1].state == "ready")
        assert np.array_equal(await gateway.embed(2, [[2]]), expected([[2]]))
        assert process.poll() is None
        assert len(made.processes) == 1


async def test_two_schedulers_of_one_replica_are_refused() -> None:
    async with stack() as made:
        made.scheduler()
        made.rank()
        gateway = made.gateway()
        await gateway.ready()
        with pytest.raises(EndpointInUse):
            made.scheduler()
        assert np.array_equal(await gateway.embed(1, [[1]]), expected([[1]]))


async def test_losing_one_rank_of_two_ends_the_other_and_they_come_back_together() -> None:
    async with stack() as made:
        scheduler = made.scheduler(tensor_parallel_size=2)
        leader, other = made.rank(0), made.rank(1)
        gateway = made.gateway()
        await gateway.ready()
        assert np.array_equal(await gateway.embed(1, [[1]]), expected([[1]]))
        other.kill()
        assert await made.ended(leader) == -signal.SIGKILL
        made.rank(1)
        await gateway.submit(2, [[2]])
        await asyncio.sleep(0.3)
        assert gateway.statuses[-1].state == "starting"  # one is not enough
        made.rank(0)
        assert (await gateway.outcome(2))[1] == expected([[2]]).tobytes()
        assert scheduler.stats.num_epochs == 2
        assert not list(addresses.replica_dir(made.run_dir, REPLICA).glob("rendezvous-*"))


async def test_a_rank_halted_by_a_signal_is_killed_long_before_its_deadlines() -> None:
    async with stack() as made:
        made.scheduler(tensor_parallel_size=2)
        leader, other = made.rank(0), made.rank(1)
        gateway = made.gateway()
        await gateway.ready()
        stale = addresses.replica_dir(made.run_dir, REPLICA) / "rendezvous-1"
        stale.touch()
        other.send_signal(signal.SIGSTOP)
        assert await made.ended(other) == -signal.SIGKILL
        assert await made.ended(leader) == -signal.SIGKILL
        assert "was stopped by a signal" in str(made.logged("epoch_ends")[0]["reason"])
        made.stop_scheduler(made.schedulers[0])
        made.scheduler(tensor_parallel_size=2)
        assert not stale.exists()  # left by a predecessor


async def test_ranks_that_disagree_do_not_begin() -> None:
    async with stack() as made:
        scheduler = made.scheduler(tensor_parallel_size=2)
        made.rank(0)
        wrong = made.rank(1, facts={"dimension": 100})
        gateway = made.gateway()
        async with asyncio.timeout(10):
            while not made.logged("no_epoch"):
                await asyncio.sleep(0.02)
        assert "disagree on dimension" in str(made.logged("no_epoch")[0]["reason"])
        assert scheduler.stats.num_epochs == 0
        wrong.kill()
        made.rank(1)
        await gateway.ready()


async def test_the_smallest_number_of_blocks_counts() -> None:
    async with stack() as made:
        made.scheduler(tensor_parallel_size=2)
        made.rank(0, facts={"num_blocks": 70})
        made.rank(1, facts={"num_blocks": 50})
        status = await made.gateway().ready()
        assert status.facts is not None
        assert status.facts.num_blocks == 50


async def test_a_second_process_for_a_rank_is_refused() -> None:
    async with stack() as made:
        made.scheduler()
        first = made.rank()
        gateway = made.gateway()
        await gateway.ready()
        twin, stranger = made.rank(), made.rank(7)
        async with asyncio.timeout(10):
            while len({event["rank"] for event in made.logged("rank_refused")}) < 2:
                await asyncio.sleep(0.02)
        assert np.array_equal(await gateway.embed(1, [[1]]), expected([[1]]))
        assert [process.poll() for process in (first, twin, stranger)] == [None] * 3
        first.kill()  # and now the twin may have its place
        assert np.array_equal(await gateway.embed(2, [[2]]), expected([[2]]))


async def test_messages_of_another_epoch_and_garbage_are_counted_and_dropped() -> None:
    async with stack() as made:
        scheduler = made.scheduler()
        made.rank()
        gateway = made.gateway()
        await gateway.ready()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ghost = dealer(context, addresses.rank_endpoint(made.run_dir, REPLICA), b"ghost")
        current = scheduler.ranks._epoch
        assert current is not None
        frames = [
            [encode(StepResult(999, 1))],  # another epoch
            [encode(StepFailed(999, 1, "fatal"))],
            [encode(StepResult(current.id, 10**6))],  # no such step
            [encode(StepResult(current.id, 1))],  # not the leader
            [encode(Heartbeat(4321, current.id))],  # nobody we know
            [encode(Heartbeat(current.members[0].incarnation, 999))],  # a member, of another epoch
            [encode(Drain(current.members[0].incarnation, 999))],
            [b"\xc1 no msgpack"],
            [b""],
        ]
        for each in frames:
            await _send(ghost, each)
        await gateway.until(lambda: scheduler.stats.stale["rank"] == len(frames))
        await gateway.send(Hello(1, "rank", 0, 1))
        for body in (b"", b"\x00" * 100, b"\xc1"):
            gateway._socket.send([body])
        gateway._socket.send([b"x", b"y", b"z", b"w"])
        await gateway.until(lambda: scheduler.stats.stale["gateway"] == 4)
        assert scheduler.ranks.is_ready
        assert np.array_equal(await gateway.embed(1, [[1]]), expected([[1]]))
        ghost.close()
        context.destroy(linger=0)


async def _send(sock: object, frames: list[bytes]) -> None:
    while True:
        try:
            return sock.send(frames)  # type: ignore[attr-defined,no-any-return]
        except PeerFull:
            await asyncio.sleep(0.01)


async def test_a_stranger_on_the_membership_socket_harms_nobody() -> None:
    async with stack() as made:
        made.scheduler()
        path = str(addresses.membership_path(made.run_dir, REPLICA))
        for garbage in (b"", b"\x00\x00\x00\x02\xff\xff", b"\xff" * 8):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(path)
                stranger.sendall(garbage)
                await asyncio.sleep(0.05)
        silent = socket.socket(socket.AF_UNIX)  # connected for ever, not a word
        silent.connect(path)
        made.rank()
        gateway = made.gateway()
        await gateway.ready()
        assert np.array_equal(await gateway.embed(1, [[1]]), expected([[1]]))
        silent.close()


async def test_an_abort_ends_a_request_that_waits() -> None:
    async with stack() as made:
        scheduler = made.scheduler()
        made.rank(latency_ms=400)
        gateway = made.gateway()
        await gateway.ready()
        for chunk in range(2):
            await gateway.submit(chunk, [[chunk + 1]])
            await gateway.until(lambda chunk=chunk: scheduler.stats.steps_in_flight == chunk + 1)
        await gateway.submit(2, [[3]])
        await gateway.submit(3, [[4]])
        await gateway.abort(3)
        message, _ = await gateway.outcome(3, seconds=0.35)
        assert isinstance(message, Rejected)
        assert message.code == "aborted"
        await gateway.outcome(2)
        assert scheduler.stats.num_rows == 3


async def test_the_work_of_a_silent_gateway_is_dropped() -> None:
    async with stack() as made:
        scheduler = made.scheduler(gateway_heartbeat_ms=500)
        process = made.rank()
        gateway = made.gateway()
        await gateway.ready()
        process.kill()
        for chunk in range(10):
            await gateway.submit(chunk, [[1]])
        await gateway.until(lambda: scheduler.stats.pending_requests == 10)
        gateway._beating.cancel()
        async with asyncio.timeout(10):
            while scheduler.stats.pending_requests:
                await asyncio.sleep(0.02)
        assert scheduler.stats.requests["aborted"] == 10
        assert made.logged("gateway_gone")


async def test_the_work_of_a_gateway_replaced_under_its_name_is_dropped() -> None:
    async with stack() as made:
        scheduler = made.scheduler()
        process = made.rank()
        gateway = made.gateway()
        await gateway.ready()
        process.kill()
        await gateway.submit(1, [[1]])
        await gateway.until(lambda: scheduler.stats.pending_requests == 1)
        await gateway.send(Hello(77, "gateway", 0, 1))  # another life under the same identity
        await gateway.until(lambda: scheduler.stats.pending_requests == 0)
        assert scheduler.gateways.incarnations == [77]


async def test_a_status_carries_the_figures_of_all() -> None:
    async with stack() as made:
        made.scheduler()
        made.rank()
        first, second = made.gateway(), made.gateway()
        await first.ready()
        await first.embed(1, [[1, 2, 3]])
        await first.send(
            Heartbeat(first.incarnation, stats=ProcessStats("gateway/0", first.incarnation, {"a_total": 5}))
        )
        found = await second.until(
            lambda: second.statuses and {each.process: each for each in second.statuses[-1].stats}.get("gateway/0")
        )
        assert found.values == {"a_total": 5}
        own = next(each for each in second.statuses[-1].stats if each.process == "scheduler/fake/0")
        labels = '{replica="fake/0",outcome="ok"}'
        assert own.values[f"bouquet_scheduler_requests_total{labels}"] == 1
        assert own.values['bouquet_scheduler_batch_tokens_count{replica="fake/0"}'] == 1


async def _serving(made: Stack, **config: int) -> tuple[asyncio.Event, "asyncio.Task[None]", HandGateway]:
    stop = asyncio.Event()
    settings = SchedulerConfig(**config)
    task = asyncio.create_task(
        serve(
            config=settings,
            replica=REPLICA,
            model="fake",
            tensor_parallel_size=1,
            run_dir=made.run_dir,
            stop=stop,
            log=made.log,
            end_rank=made.ended_ranks.append,
        )
    )
    gateway = made.gateway()
    await gateway.ready()
    return stop, task, gateway


async def test_a_stop_finishes_what_is_here_and_takes_nothing_more() -> None:
    async with stack() as made:
        process = made.rank(latency_ms=200)
        stop, task, gateway = await _serving(made)
        for chunk in range(8):
            await gateway.submit(chunk, [[chunk + 1]] * 100)
        await asyncio.sleep(0.1)
        stop.set()
        await gateway.until(lambda: gateway.statuses[-1].state == "draining")
        await gateway.submit(9, [[9]])
        message, _ = await gateway.outcome(9)
        assert isinstance(message, Rejected)
        assert message.code == "draining"
        for chunk in range(8):
            assert (await gateway.outcome(chunk))[1] == expected([[chunk + 1]] * 100).tobytes()
        await task
        assert process.poll() is None  # ranks stay for the next scheduler


async def test_a_stop_rejects_what_does_not_end_in_time() -> None:
    async with stack() as made:
        made.rank(latency_ms=60_000)
        stop, task, gateway = await _serving(made, drain_timeout_ms=300)
        for chunk in range(3):
            await gateway.submit(chunk, [[chunk + 1]])
        await asyncio.sleep(0.1)
        stop.set()
        for chunk in range(3):
            message, _ = await gateway.outcome(chunk)
            assert isinstance(message, Rejected)
            assert message.code == "draining"
        await task


async def test_a_stop_does_not_wait_for_ranks_that_stop_too() -> None:
    async with stack() as made:
        process = made.rank(latency_ms=300)
        stop, task, gateway = await _serving(made)
        await gateway.embed(99, [[1]])  # and the first canary is over, too
        for chunk in range(6):
            await gateway.submit(chunk, [[chunk + 1] * 500] * 8)  # a step each
        await gateway.until(lambda: gateway.statuses[-1].num_requests >= 4)
        stop.set()
        process.terminate()
        codes = []
        for chunk in range(6):
            message, _ = await gateway.outcome(chunk)
            codes.append(message.code if isinstance(message, Rejected) else "ok")
        await task
        finished = codes.count("ok")
        # what was in flight was finished, what waited goes elsewhere
        assert 1 <= finished <= 5, [(e["event"], e.get("reason"), e.get("state")) for e in made.events[6:]]
        assert codes == ["ok"] * finished + ["draining"] * (6 - finished)


async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    async with stack() as made:  # a first life, so that lazily made descriptors exist
        made.scheduler()
        await asyncio.sleep(0)
    before = len(os.listdir("/proc/self/fd"))
    async with stack() as made:
        made.scheduler()
        gateway = made.gateway()
        for chunk in range(4):
            process = made.rank()
            await gateway.submit(chunk, [[chunk + 1]])
            await gateway.until(lambda: gateway.statuses and gateway.statuses[-1].state == "ready")
            process.kill()
            await gateway.until(lambda: gateway.statuses[-1].state == "starting")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_error_of_our_own_ends_the_scheduler_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack() as made:
        process = made.rank()
        _, task, gateway = await _serving(made)
        with monkeypatch.context() as patch:
            patch.setattr("scheduler.embedding.batcher.read_rows", _broken)
            await gateway.submit(1, [[1]])
            with pytest.raises(RuntimeError, match="broken"):
                await task
        made.scheduler()
        await gateway.until(lambda: len({status.incarnation for status in gateway.statuses}) == 2)
        await gateway.ready()
        assert np.array_equal(await gateway.embed(2, [[2]]), expected([[2]]))
        assert process.poll() is None


async def test_an_error_at_the_door_is_that_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack() as made:
        made.rank()
        stop, task, gateway = await _serving(made)
        with monkeypatch.context() as patch:
            patch.setattr("scheduler.embedding.batcher.admit", _broken)
            await gateway.submit(1, [[1]])
            message, _ = await gateway.outcome(1)
        assert isinstance(message, Rejected)
        assert message.code == "invalid"
        assert np.array_equal(await gateway.embed(2, [[2]]), expected([[2]]))
        stop.set()
        await task


async def test_a_scheduler_that_stood_still_blames_nobody() -> None:
    async with stack() as made:
        scheduler = made.scheduler(rank_heartbeat_ms=4000, gateway_heartbeat_ms=4000, canary_interval_ms=10**6)
        process = made.rank()
        gateway = made.gateway()
        await gateway.ready()
        time.sleep(5)  # noqa: ASYNC251 - the whole loop stands still
        await asyncio.sleep(0.5)
        assert process.poll() is None
        assert scheduler.gateways.incarnations == [gateway.incarnation]


def _broken(*_: object) -> None:
    raise RuntimeError("broken")
