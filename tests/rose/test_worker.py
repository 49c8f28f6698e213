"""The rank's main loop against a hand-driven scheduler: real processes, real sockets, a real ring."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from ipc import addresses
from ipc.codec import FROM_RANK, encode
from ipc.control import Drain, Heartbeat, Hello, Join
from ipc.membership import MembershipSocket
from ipc.sockets import Socket, router
from ipc.step import ROW_DIMENSIONS, ROW_OUTPUT_OFFSET, Ready, Shutdown, StepFailed, StepPlan, StepResult
from ipc.step_ring import StepRing, layout_for
from tests.fakes.rank import expected_vector

REPLICA = "fake/0"


class HandScheduler:
    """Speaks the scheduler's side one word at a time."""

    def __init__(self, run_dir: Path) -> None:
        path = addresses.membership_path(run_dir, REPLICA)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.settimeout(20)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router: Socket = router(self.context, addresses.rank_endpoint(run_dir, REPLICA))
        self.peer = b""
        self.ring: StepRing | None = None
        self.membership: MembershipSocket | None = None

    def join(self, epoch: int, members: list[int] | None = None, others: list[int] | None = None) -> Hello:
        """`others` are ranks beside the one that says Hello."""
        connection, _ = self.listener.accept()
        connection.settimeout(20)
        self.membership = MembershipSocket(connection)
        hello, _ = self.membership.receive()
        assert isinstance(hello, Hello)
        assert hello.facts is not None
        layout = layout_for(hello.facts)
        self.ring = StepRing.create(layout)
        join = Join(epoch, 7, 0, members or [hello.incarnation, *(others or [])], "", layout)
        self.membership.send(join, self.ring.fd)
        return hello

    def receive(self, kind: type) -> object:
        while True:
            assert self.router.poll(20_000), f"no {kind.__name__} came"
            frames = self.router.receive()
            assert frames is not None
            self.peer, body = frames
            message = FROM_RANK.decode(body)
            if not isinstance(message, Heartbeat) or kind is Heartbeat:
                assert isinstance(message, kind), message
                return message

    def send_step(self, epoch: int, step: int, rows: list[list[int]], slot: int = 0) -> None:
        assert self.ring is not None
        arrays = self.ring.slot(slot)
        ids = np.concatenate([np.asarray(row, np.int32) for row in rows])
        arrays["input_ids"][: len(ids)] = ids
        arrays["cu_seqlens"][: len(rows) + 1] = np.cumsum([0] + [len(row) for row in rows])
        arrays["rows"][: len(rows)] = -1
        for index in range(len(rows)):
            arrays["rows"][index, ROW_DIMENSIONS] = -1
            arrays["rows"][index, ROW_OUTPUT_OFFSET] = index * 384 * 4
        self.ring.write_header(slot, epoch, step, len(rows), len(ids))
        self.router.send([self.peer, encode(StepPlan(epoch, step, slot, "encode", len(rows), len(ids)))])

    def values(self, num_rows: int, slot: int = 0) -> NDArray[np.float32]:
        assert self.ring is not None
        raw = np.array(self.ring.slot(slot)["values"][: num_rows * 384 * 4])
        return raw.view(np.float32).reshape(num_rows, 384)

    def close(self) -> None:
        self.listener.close()
        if self.membership is not None:
            self.membership.close()
        self.router.close()
        self.context.destroy(linger=0)
        if self.ring is not None:
            self.ring.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def scheduler(run_dir: Path) -> Iterator[HandScheduler]:
    made = HandScheduler(run_dir)
    yield made
    made.close()


@pytest.fixture
def start_rank(run_dir: Path) -> Iterator[object]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.fakes.rank", "--run-dir", str(run_dir), "--replica", REPLICA]
        started.append(subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_steps_are_answered_in_order(scheduler: HandScheduler, start_rank) -> None:
    start_rank("--latency-ms", "20")
    hello = scheduler.join(epoch=5)
    ready = scheduler.receive(Ready)
    assert isinstance(ready, Ready)
    assert (ready.epoch, ready.incarnation) == (5, hello.incarnation)
    scheduler.send_step(5, 1, [[1, 2, 3], [4]], slot=0)
    scheduler.send_step(5, 2, [[9, 9]], slot=1)
    for step in (1, 2):
        result = scheduler.receive(StepResult)
        assert isinstance(result, StepResult)
        assert (result.epoch, result.step) == (5, step)
    np.testing.assert_array_equal(scheduler.values(2, 0)[0], expected_vector([1, 2, 3], 384))
    np.testing.assert_array_equal(scheduler.values(1, 1)[0], expected_vector([9, 9], 384))


def test_a_stale_plan_is_dropped(scheduler: HandScheduler, start_rank) -> None:
    start_rank()
    scheduler.join(epoch=5)
    scheduler.receive(Ready)
    scheduler.send_step(4, 1, [[1]], slot=0)  # an epoch that is over
    scheduler.send_step(5, 2, [[2]], slot=1)
    result = scheduler.receive(StepResult)
    assert isinstance(result, StepResult)
    assert result.step == 2


def test_an_ordered_stop_drains(scheduler: HandScheduler, start_rank) -> None:
    process = start_rank("--latency-ms", "300")
    scheduler.join(epoch=5)
    scheduler.receive(Ready)
    scheduler.send_step(5, 1, [[1]])
    scheduler.receive(Heartbeat)
    process.send_signal(signal.SIGTERM)
    scheduler.receive(Drain)
    scheduler.receive(StepResult)
    assert process.wait(10) == 0


def test_stops_while_waiting_for_a_scheduler(start_rank) -> None:
    process = start_rank()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_the_same_rank_joins_the_next_scheduler(run_dir: Path, scheduler: HandScheduler, start_rank) -> None:
    process = start_rank()
    first = scheduler.join(epoch=5)
    scheduler.receive(Ready)
    scheduler.close()
    second_scheduler = HandScheduler(run_dir)
    second = second_scheduler.join(epoch=6)
    second_scheduler.receive(Ready)
    second_scheduler.send_step(6, 1, [[3, 4]])
    second_scheduler.receive(StepResult)
    assert second.incarnation == first.incarnation
    assert process.poll() is None
    second_scheduler.close()


def test_another_set_of_members_means_exit(run_dir: Path, scheduler: HandScheduler, start_rank) -> None:
    process = start_rank()
    hello = scheduler.join(epoch=5)
    scheduler.receive(Ready)
    scheduler.close()
    second_scheduler = HandScheduler(run_dir)
    second_scheduler.join(epoch=6, members=[hello.incarnation, 1234])
    assert process.wait(10) == 75
    second_scheduler.close()


@pytest.mark.parametrize("waits_in", ["--load-ms", "--drain-ms"])
def test_a_rank_of_a_group_does_not_wait_for_ever(scheduler: HandScheduler, start_rank, waits_in: str) -> None:
    """Its scheduler dies before it told the others to join, or of a step."""
    process = start_rank(waits_in, "60000")
    scheduler.join(epoch=5, others=[1234])
    if waits_in == "--drain-ms":
        scheduler.receive(Ready)
        scheduler.send_step(5, 1, [[1]])
        scheduler.receive(StepResult)
    scheduler.close()
    assert process.wait(10) == 75


def test_out_of_memory_of_a_rank_in_a_group_is_a_fault(scheduler: HandScheduler, start_rank) -> None:
    process = start_rank("--oom-over", "3")
    scheduler.join(epoch=5, others=[1234])
    scheduler.receive(Ready)
    scheduler.send_step(5, 1, [[1, 2, 3, 4]])
    failed = scheduler.receive(StepFailed)
    assert isinstance(failed, StepFailed)
    assert (failed.step, failed.kind) == (1, "fatal")
    assert process.wait(10) == 70


def test_shutdown_ends_the_process(scheduler: HandScheduler, start_rank) -> None:
    process = start_rank()
    scheduler.join(epoch=5)
    scheduler.receive(Ready)
    scheduler.router.send([scheduler.peer, encode(Shutdown(5, "test"))])
    assert process.wait(10) == 0


def test_a_fault_is_told_and_ends_the_process(scheduler: HandScheduler, start_rank) -> None:
    process = start_rank("--fault-on", "666")
    scheduler.join(epoch=5)
    scheduler.receive(Ready)
    scheduler.send_step(5, 1, [[1, 666]])
    failed = scheduler.receive(StepFailed)
    assert isinstance(failed, StepFailed)
    assert (failed.step, failed.kind) == (1, "fatal")
    assert process.wait(10) == 70


def test_out_of_memory_is_told_and_survived(scheduler: HandScheduler, start_rank) -> None:
    start_rank("--oom-over", "3")
    scheduler.join(epoch=5)
    scheduler.receive(Ready)
    scheduler.send_step(5, 1, [[1, 2, 3, 4]])
    failed = scheduler.receive(StepFailed)
    assert isinstance(failed, StepFailed)
    assert failed.kind == "oom"
    scheduler.send_step(5, 2, [[1, 2]])
    assert isinstance(scheduler.receive(StepResult), StepResult)


def test_descriptors_do_not_leak_over_schedulers(run_dir: Path, scheduler: HandScheduler, start_rank) -> None:
    process = start_rank()
    scheduler.join(epoch=1)
    scheduler.receive(Ready)
    scheduler.close()
    counts = []
    for epoch in (2, 3, 4):
        following = HandScheduler(run_dir)
        following.join(epoch=epoch)
        following.receive(Ready)
        counts.append(len(os.listdir(f"/proc/{process.pid}/fd")))
        following.close()
    assert counts[0] == counts[-1], counts


def test_a_rank_tells_its_figures(scheduler: HandScheduler, start_rank) -> None:
    start_rank()
    scheduler.join(epoch=5)
    scheduler.receive(Ready)
    scheduler.send_step(5, 1, [[1]])
    scheduler.receive(StepResult)
    name = 'bouquet_rank_fake_steps_total{replica="fake/0",rank="0"}'
    while True:
        beat = scheduler.receive(Heartbeat)
        assert isinstance(beat, Heartbeat)
        assert beat.stats is not None
        assert beat.stats.process == "rank/fake/0/0"
        if beat.stats.values[name] == 1:  # the first beat may come before the step
            return
