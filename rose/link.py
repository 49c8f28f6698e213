"""A rank's two connections to its scheduler: membership (Unix socket, ring) and steps.

Knows the protocol and the order of its words; knows nothing of models, tensors or what a step computes.
"""

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from ipc import addresses
from ipc.codec import TO_RANK, DecodeError, ToRank, encode
from ipc.control import Hello, Join
from ipc.membership import MembershipClosed, MembershipSocket
from ipc.sockets import Context, PeerFull, PeerGone, Socket, dealer
from ipc.step_ring import StepRing
from ipc.types import ModelFacts

RETRY_SECONDS = 0.1
CONNECT_SECONDS = 10.0
RESEND_SECONDS = 0.02


class Stopped(Exception):
    """An ordered stop came while waiting."""


class SchedulerGone(ConnectionError):
    """The scheduler died or left; say Hello again."""


class SchedulerLink:
    """One epoch's connections: made by `join`, gone with `close`. Used by one thread."""

    def __init__(
        self,
        membership: MembershipSocket,
        join: Join,
        ring: StepRing,
        socket: Socket,
        stop_fd: int,
    ) -> None:
        self.join = join
        self.ring = ring
        self.num_stale = 0
        self._membership = membership
        self._socket = socket
        self._stop_fd = stop_fd
        self._poller = select.poll()
        for fd in (socket.fileno(), membership.fileno(), stop_fd):
            self._poller.register(fd, select.POLLIN)
        self._wake_fd = -1

    @classmethod
    def open(
        cls,
        *,
        context: Context,
        run_dir: Path,
        replica: str,
        rank: int,
        incarnation: int,
        facts: ModelFacts,
        stop_fd: int,
        log: Callable[..., None],
    ) -> "SchedulerLink":
        """Says Hello until a scheduler answers with Join. Raises Stopped when asked to stop first."""
        hello = Hello(incarnation=incarnation, role="rank", index=rank, pid=os.getpid(), facts=facts)
        log("waiting_for_scheduler", replica=replica, rank=rank)
        while True:
            try:
                membership = MembershipSocket.connect(addresses.membership_path(run_dir, replica))
            except OSError:
                _sleep_or_stop(RETRY_SECONDS, stop_fd)
                continue
            try:
                membership.send(hello)
                _wait_readable(membership.fileno(), stop_fd)
                join, ring = _receive_join(membership)
            except OSError:
                membership.close()
                _sleep_or_stop(RETRY_SECONDS, stop_fd)
                continue
            except BaseException:
                membership.close()
                raise
            identity = f"rank-{rank}-{incarnation:x}-{join.epoch:x}".encode()
            socket = dealer(context, addresses.rank_endpoint(run_dir, replica), identity)
            return cls(membership, join, ring, socket, stop_fd)

    def send(self, message: Struct) -> None:
        """Sends, waiting while the connection is being made. Raises SchedulerGone if the scheduler goes."""
        frames = [encode(message)]
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                return self._socket.send(frames)
            except (PeerFull, PeerGone) as error:
                if time.monotonic() > deadline:
                    raise SchedulerGone("the scheduler takes no messages") from error
                time.sleep(RESEND_SECONDS)
                self._check_scheduler()

    def receive(self) -> ToRank | None:
        """The next message of this epoch; those of other epochs are dropped and counted."""
        while frames := self._socket.receive():
            try:
                message = TO_RANK.decode(frames[-1])
            except DecodeError:
                self.num_stale += 1
                continue
            if message.epoch == self.join.epoch:
                return message
            self.num_stale += 1
        return None

    def wait(self, timeout_ms: int, wake_fd: int = -1) -> bool:
        """Sleeps until a message, `wake_fd`, the stop or the time; tells whether a stop was asked for.

        Raises SchedulerGone when the scheduler died.
        """
        if wake_fd != self._wake_fd:
            if self._wake_fd >= 0:
                self._poller.unregister(self._wake_fd)
            if wake_fd >= 0:
                self._poller.register(wake_fd, select.POLLIN)
            self._wake_fd = wake_fd
        events = dict(self._poller.poll(timeout_ms))
        if self._membership.fileno() in events:
            raise SchedulerGone("the scheduler closed the membership socket")
        return self._stop_fd in events

    def ignore_stop(self) -> None:
        """From now on the stop descriptor wakes nobody: the stop is under way."""
        self._poller.unregister(self._stop_fd)

    def close(self) -> None:
        """Unmaps the ring and closes both connections. No step may be running."""
        self._socket.close()
        self._membership.close()
        self.ring.close()

    def scheduler_gone(self) -> bool:
        """Whether the scheduler has closed the membership socket; any thread may ask."""
        return bool(select.select([self._membership.fileno()], [], [], 0)[0])

    def _check_scheduler(self) -> None:
        if self.scheduler_gone():
            raise SchedulerGone("the scheduler closed the membership socket")


def _receive_join(membership: MembershipSocket) -> tuple[Join, StepRing]:
    """Raises MembershipClosed for any other message; RingError for a ring that is not what Join says."""
    join, fd = membership.receive()
    if isinstance(join, Join) and fd is not None:
        return join, StepRing.attach(fd, join.layout)
    if fd is not None:
        os.close(fd)
    raise MembershipClosed(f"expected Join and a ring, got {type(join).__name__}")


def _wait_readable(fd: int, stop_fd: int) -> None:
    if stop_fd in select.select([fd, stop_fd], [], [])[0]:
        raise Stopped


def _sleep_or_stop(seconds: float, stop_fd: int) -> None:
    if select.select([stop_fd], [], [], seconds)[0]:
        raise Stopped
