"""The main loop of one rank: receive plans, launch steps, send results when they have landed.

One thread. It never waits for the device on the launch path: `step` returns a LazyTensor at once, and the loop
sleeps on the socket and on the oldest LazyTensor together. Free of torch: the runner brings that.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import zmq

from ipc.control import Drain, Heartbeat, ProcessStats
from ipc.step import Ready, Shutdown, StepFailed, StepPlan, StepResult
from ipc.types import new_incarnation
from rose.distributed.watch import leaving_when
from rose.link import SchedulerGone, SchedulerLink, Stopped
from rose.runner import LazyTensor, OutOfMemory, Runner

EXIT_STOPPED = 0
EXIT_FAULT = 70  # a fault of device or model: the process cannot be trusted any more
EXIT_REGROUP = 75  # the group has other members now: start afresh
HEARTBEAT_SECONDS = 1.0
QUIET_MS = 50  # after an ordered stop: no plan for so long means that none is under way
GROUP_SECONDS = 5.0  # for the last steps of a group, of which only some ranks may have been told

Log = Callable[..., None]


def serve(*, runner: Runner, replica: str, rank: int, run_dir: Path, stop_fd: int, log: Log, spin_us: int = 0) -> int:
    """Serves steps until `stop_fd` becomes readable; returns the exit code. Outlives schedulers."""
    incarnation = new_incarnation()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    members: list[int] | None = None
    try:
        while True:
            link = SchedulerLink.open(
                context=context,
                run_dir=run_dir,
                replica=replica,
                rank=rank,
                incarnation=incarnation,
                facts=runner.facts,
                stop_fd=stop_fd,
                log=log,
            )
            started = time.monotonic()
            if members is None:
                _load(runner, link, log)
                members = link.join.members
            elif link.join.members != members:
                log("regroup", replica=replica, rank=rank)
                return EXIT_REGROUP
            load_ms = (time.monotonic() - started) * 1000
            loop = _Epoch(link, runner, incarnation, replica, rank, log, spin_us)
            try:
                runner.attach(link.ring)
                link.send(Ready(link.join.epoch, incarnation, rank, runner.facts, load_ms))
                log(
                    "ready",
                    replica=replica,
                    rank=rank,
                    epoch=f"{link.join.epoch:x}",
                    load_ms=round(load_ms, 1),
                    **runner.figures(),
                )
                loop.run()
                return EXIT_STOPPED
            except SchedulerGone as gone:
                log("scheduler_gone", replica=replica, rank=rank, reason=str(gone))
                loop.launch_left()
            finally:
                loop.drain()
                runner.attach(None)
                link.close()
    except Stopped:
        return EXIT_STOPPED
    finally:
        context.destroy(linger=0)


def _load(runner: Runner, link: SchedulerLink, log: Log) -> None:
    """A group is formed on the way. Ranks that the scheduler told nothing of it before it died never come."""
    if len(link.join.members) == 1:
        runner.load(link.join)
        return
    with leaving_when(link.scheduler_gone, lambda: _leave(log, "the scheduler died while the group was loading")):
        runner.load(link.join)


def _leave(log: Log, reason: str) -> None:
    """The group cannot go on. No teardown: that would wait for the other ranks."""
    log("group_left", level="error", reason=reason)
    os._exit(EXIT_REGROUP)


class _Refused:
    """The result of a step that was not launched."""

    def __init__(self, error: OutOfMemory) -> None:
        self.error = error

    def ready(self) -> bool:
        raise self.error

    def fileno(self) -> int:
        return -1


class _Epoch:
    """The loop within one epoch."""

    def __init__(
        self, link: SchedulerLink, runner: Runner, incarnation: int, replica: str, rank: int, log: Log, spin_us: int
    ) -> None:
        self.link = link
        self.runner = runner
        self.incarnation = incarnation
        self.epoch = link.join.epoch
        self.replica = replica
        self.rank = rank
        self.leads, self.grouped = rank == 0, len(link.join.members) > 1
        self.log = log
        self.spin_seconds = spin_us / 1e6
        self.pending: deque[tuple[StepPlan, LazyTensor, float]] = deque()
        self.last_step = 0
        self.stopping = False

    def run(self) -> None:
        """Until Shutdown or an ordered stop. Raises SchedulerGone."""
        next_beat = spin_until = 0.0
        while True:
            busy = bool(self.pending)
            received = self.launch_received()
            self.answer_finished()
            now = time.monotonic()
            if received or self.pending:
                spin_until = now + self.spin_seconds
            if now >= next_beat:
                self.link.send(Heartbeat(self.incarnation, self.epoch, self.last_step, self.stats()))
                next_beat = now + HEARTBEAT_SECONDS
            if self.stopping and not received and not busy:  # a round ago: the I/O thread has sent the last result
                self.log("stopped", last_step=self.last_step)
                return
            if self.link.wait(*self.patience(now, next_beat, spin_until)) and not self.stopping:
                self.stopping = True
                self.link.ignore_stop()
                self.link.send(Drain(self.incarnation, self.epoch))
                self.link.wait(QUIET_MS)

    def patience(self, now: float, next_beat: float, spin_until: float) -> tuple[int, int]:
        """How long to sleep (ms) and on which descriptor besides the socket."""
        wake_fd = self.pending[0][1].fileno() if self.pending else -1
        if now < spin_until or (self.pending and wake_fd < 0):
            return 0, wake_fd
        if self.stopping:
            return QUIET_MS, wake_fd
        return max(1, int((next_beat - now) * 1000)), wake_fd

    def launch_received(self) -> bool:
        """Launches every plan that has arrived; tells whether there was any."""
        received = False
        while (message := self.link.receive()) is not None:
            received = True
            match message:
                case StepPlan() as plan:
                    self.launch(plan)
                case Shutdown(reason=reason):
                    self.log("shutdown", reason=reason)
                    raise Stopped
        return received

    def launch_left(self) -> None:
        """The scheduler has gone: what a group was sent must have run on all its ranks before they serve another."""
        if self.grouped:
            self.launch_received()

    def drain(self) -> None:
        """Waits until no step is running. Other ranks of a group may never have been sent the last ones."""
        if not self.grouped:
            self.runner.drain()
            return
        deadline = time.monotonic() + GROUP_SECONDS
        with leaving_when(
            lambda: time.monotonic() > deadline,
            lambda: _leave(self.log, "the other ranks did not take part in the last steps"),
        ):
            self.runner.drain()

    def launch(self, plan: StepPlan) -> None:
        sizes = self.link.ring.check_header(plan.slot, self.epoch, plan.step)
        assert sizes == (plan.num_seqs, plan.num_tokens), f"step {plan.step}: its slot has {sizes} sequences and tokens"
        started = time.monotonic()
        try:
            lazy = self.runner.step(plan, self.link.ring.slot(plan.slot))
        except OutOfMemory as error:
            if self.grouped:
                self.die(plan, error)
            self.pending.append((plan, _Refused(error), started))  # told in its turn
        except Exception as error:  # noqa: BLE001 - process loop: any other fault ends the process
            self.die(plan, error)
        else:
            self.pending.append((plan, lazy, started))

    def answer_finished(self) -> None:
        """Sends the results of finished steps, oldest first."""
        while self.pending:
            plan, lazy, started = self.pending[0]
            try:
                if not lazy.ready():
                    return
            except OutOfMemory as error:
                if self.grouped:  # the other ranks may have computed it: they must not go on together
                    self.die(plan, error)
                self.pending.popleft()
                self.fail_small(plan, error)
                continue
            except Exception as error:  # noqa: BLE001 - process loop: any other fault ends the process
                self.die(plan, error)
            self.pending.popleft()
            self.last_step = plan.step
            if self.leads:
                compute_us = int((time.monotonic() - started) * 1e6)
                self.link.send(StepResult(self.epoch, plan.step, compute_us, self.runner.idle_work))

    def stats(self) -> ProcessStats | None:
        """The runner's figures as Prometheus samples; None where it has none."""
        labels = f'{{replica="{self.replica}",rank="{self.rank}"}}'
        values = {f"bouquet_rank_{name}{labels}": float(value) for name, value in self.runner.figures().items()}
        return ProcessStats(f"rank/{self.replica}/{self.rank}", self.incarnation, values) if values else None

    def fail_small(self, plan: StepPlan, error: OutOfMemory) -> None:
        self.log("step_out_of_memory", step=plan.step, num_seqs=plan.num_seqs, num_tokens=plan.num_tokens)
        self.link.send(StepFailed(self.epoch, plan.step, "oom", str(error)))

    def die(self, plan: StepPlan, error: Exception) -> NoReturn:
        """Tells the scheduler and ends the process at once: no teardown of a device in an unknown state."""
        self.log("step_fault", level="error", step=plan.step, error=f"{type(error).__name__}: {error}")
        try:
            self.link.send(StepFailed(self.epoch, plan.step, "fatal", type(error).__name__))
            time.sleep(0.05)  # the I/O thread sends
        finally:
            os._exit(EXIT_FAULT)
