"""The link to this replica's ranks: epochs begin and end here, plans go out, results come in.

Losing one rank of an epoch ends the others too; a new epoch begins when every rank has said Hello again. Knows
nothing of requests: what a lost step means is the planner's affair.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from ipc import addresses
from ipc.codec import FROM_RANK, DecodeError, encode
from ipc.control import Drain, Heartbeat, ProcessStats
from ipc.sockets import Context, EventSocket, SocketError, router
from ipc.step import Ready, Shutdown, StepFailed, StepPlan, StepResult
from ipc.step_ring import Arrays
from ipc.types import ModelFacts
from scheduler.config import SchedulerConfig
from scheduler.epoch import BadFacts, Epoch
from scheduler.membership import Member, Membership
from scheduler.stats import Stats

LEADER = 0
STOPPED_SECONDS = 3.0  # a rank halted for longer is killed, whatever its deadline


class RankEvents(Protocol):
    """What the link tells the loop."""

    def on_ranks_ready(self, facts: ModelFacts) -> None: ...

    def on_outcome(self, outcome: StepResult | StepFailed, arrays: Arrays) -> None: ...

    def on_ranks_draining(self) -> None: ...

    def on_ranks_lost(self, epoch: int, ordered: bool) -> None: ...


class RankLink:
    def __init__(
        self,
        context: Context,
        run_dir: Path,
        replica: str,
        tensor_parallel_size: int,
        incarnation: int,
        config: SchedulerConfig,
        stats: Stats,
        events: RankEvents,
        log: Callable[..., None],
        end_rank: Callable[[int], object],
    ) -> None:
        """`end_rank` ends a rank's process whose pid nobody here knows, since it never said Hello.

        Raises ipc.sockets.EndpointInUse if another scheduler serves this replica.
        """
        self._replica_dir = addresses.replica_dir(run_dir, replica)
        self._size = tensor_parallel_size
        self._incarnation = incarnation
        self._config = config
        self._stats = stats
        self._events = events
        self._log = log
        self._end_rank = end_rank
        # rank → when it was last here
        self._missing_since = dict.fromkeys(range(tensor_parallel_size), time.monotonic())
        self._fresh: dict[int, Member] = {}  # rank → said Hello, not in an epoch yet
        self._leaving: dict[Member, float] = {}  # ranks of an epoch that ended in order → when to kill them
        self._stopped_since: dict[Member, float] = {}  # ranks halted by a signal
        self._stats_of: dict[int, ProcessStats] = {}  # incarnation → its figures
        self._epoch: Epoch | None = None
        socket = router(context, addresses.rank_endpoint(run_dir, replica))
        for left in self._replica_dir.glob("rendezvous-*"):  # of a predecessor that died
            left.unlink(missing_ok=True)
        path = addresses.membership_path(run_dir, replica)
        self._membership = Membership(path, self._on_hello, self._on_hangup, self._on_death, log)
        self._socket = EventSocket(socket, self._on_message, asyncio.get_running_loop(), spin_us=config.spin_us)

    # --- for the loop ---------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._epoch is not None and self._epoch.is_ready and not self._epoch.draining

    @property
    def process_stats(self) -> list[ProcessStats]:
        return list(self._stats_of.values())

    def free_slot(self) -> int | None:
        return None if self._epoch is None else self._epoch.free_slot()

    def arrays(self, slot: int) -> Arrays:
        assert self._epoch is not None
        return self._epoch.arrays(slot)

    def send(self, plan: StepPlan) -> None:
        """Hands a plan, whose arrays are in its slot, to every rank. One that cannot be reached ends the epoch."""
        epoch = self._epoch
        assert epoch is not None
        epoch.launch(plan, time.monotonic())
        body = encode(replace(plan, epoch=epoch.id))
        try:
            for identity, _ in epoch.ready.values():
                self._socket.send([identity, body])
        except SocketError as error:
            self.end_epoch(f"a plan could not be sent: {error}")

    def check(self, now: float) -> None:
        """Kills ranks past a deadline. Messages that have arrived count first."""
        self._receive_all()
        epoch, config = self._epoch, self._config
        if epoch is not None:
            reason = epoch.overdue(now, config.step_deadline_ms, config.load_deadline_ms, config.rank_heartbeat_ms)
            if reason := reason or self._halted(epoch, now):
                self.end_epoch(reason)
        for member, kill_at in self._leaving.items():
            if now > kill_at:
                member.kill()
        self._end_missing(now)

    def _end_missing(self, now: float) -> None:
        for rank, since in self._missing_since.items():
            if self._holder(rank) is not None:
                self._missing_since[rank] = now
            elif now - since > self._config.hello_deadline_ms / 1000:
                self._missing_since[rank] = now
                self._end_rank(rank)

    def _halted(self, epoch: Epoch, now: float) -> str:
        """Which rank stands still by a signal, or ""."""
        halted = [member for member in epoch.members if member.stopped()]
        self._stopped_since = {member: self._stopped_since.get(member, now) for member in halted}
        late = (member for member, since in self._stopped_since.items() if now - since > STOPPED_SECONDS)
        return next((f"rank {member.rank} (pid {member.pid}) was stopped by a signal" for member in late), "")

    def close(self) -> None:
        """Ranks live on and wait for a successor."""
        self._membership.close()
        self._socket.close()
        if self._epoch is not None:
            self._forget_epoch(self._epoch)

    # --- membership -----------------------------------------------------------------------------------------

    def _on_hello(self, member: Member) -> None:
        if member.rank in self._missing_since:
            self._missing_since[member.rank] = time.monotonic()
        holder = self._holder(member.rank)
        if holder is not None and holder.dead():
            self._membership.reap(holder)
            holder = self._holder(member.rank)
        if not 0 <= member.rank < self._size:
            self._membership.dismiss(member, f"rank {member.rank} of {self._size} (tensor_parallel_size)")
        elif holder is not None:
            self._membership.dismiss(member, f"rank {member.rank} is taken by pid {holder.pid}")
        else:
            self._log("rank_hello", rank=member.rank, pid=member.pid)
            self._fresh[member.rank] = member
            self._begin_epoch()

    def _holder(self, rank: int) -> Member | None:
        if rank in self._fresh:
            return self._fresh[rank]
        members = [] if self._epoch is None else self._epoch.members
        return next((member for member in members if member.rank == rank), None)

    def _on_hangup(self, member: Member) -> None:
        """Its death follows, or is made to follow; a rank on its way out in order gets the time for it."""
        epoch = self._epoch
        if self._fresh.get(member.rank) is member:
            del self._fresh[member.rank]
            self._membership.dismiss(member, "it hung up before it could join")
        elif epoch is not None and member in epoch.members:
            self._receive_all()  # a Drain may have come just before
            if epoch is self._epoch and epoch.draining:
                self.end_epoch(f"rank {member.rank} (pid {member.pid}) has left", ordered=True)
            elif member not in self._leaving:
                member.kill()

    def _on_death(self, member: Member) -> None:
        self._stats_of.pop(member.incarnation, None)
        self._leaving.pop(member, None)
        if self._fresh.get(member.rank) is member:
            del self._fresh[member.rank]
        if self._epoch is not None and member in self._epoch.members:
            self._receive_all()  # what it said before it died is still true
        if self._epoch is not None and member in self._epoch.members:
            self.end_epoch(f"rank {member.rank} (pid {member.pid}) is gone")

    # --- epochs ---------------------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        """Once every rank has said Hello: makes the ring and tells them to join."""
        if self._epoch is not None or len(self._fresh) < self._size:
            return
        members = [self._fresh[rank] for rank in range(self._size)]
        try:
            epoch = Epoch(members, time.monotonic())
        except (BadFacts, OSError, OverflowError) as error:
            self._log("no_epoch", level="error", reason=str(error))
            for member in members:
                del self._fresh[member.rank]
                self._membership.dismiss(member, str(error))
            return
        self._fresh.clear()
        self._epoch = epoch
        self._stats.num_epochs += 1
        self._log("epoch_begins", epoch=f"{epoch.id:x}", ranks=self._size)
        rendezvous = "" if self._size == 1 else f"file://{self._rendezvous(epoch)}"
        for member in members:
            member.send(epoch.join_for(member, self._incarnation, rendezvous), epoch.ring.fd)

    def end_epoch(self, reason: str, ordered: bool = False) -> None:
        """No more steps under this epoch. Ordered: its ranks leave by themselves; else they are killed."""
        epoch = self._epoch
        assert epoch is not None
        ordered = ordered or epoch.draining
        self._log("epoch_ends", level="info" if ordered else "error", epoch=f"{epoch.id:x}", reason=reason)
        self._stats.num_deaths += not ordered
        now = time.monotonic()
        for member in epoch.members:
            if not ordered:
                member.kill()
            elif not member.gone:
                self._leaving[member] = now + self._config.step_deadline_ms / 1000
        if ordered:
            self._send_shutdown(epoch, reason)
        self._forget_epoch(epoch)
        self._events.on_ranks_lost(epoch.id, ordered)
        self._begin_epoch()

    def _forget_epoch(self, epoch: Epoch) -> None:
        self._epoch = None
        epoch.ring.close()
        self._rendezvous(epoch).unlink(missing_ok=True)

    def _send_shutdown(self, epoch: Epoch, reason: str) -> None:
        for identity, _ in epoch.ready.values():
            with contextlib.suppress(SocketError):
                self._socket.send([identity, encode(Shutdown(epoch.id, reason))])

    def _rendezvous(self, epoch: Epoch) -> Path:
        return self._replica_dir / f"rendezvous-{epoch.id:x}"

    # --- messages -------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        while (frames := self._socket.socket.receive()) is not None:
            self._on_message(frames)

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            message = FROM_RANK.decode(frames[-1])
        except DecodeError:
            self._stats.stale["rank"] += 1
            return
        epoch, identity = self._epoch, frames[0]
        match message:
            case _ if epoch is None or message.epoch != epoch.id:
                self._stats.stale["rank"] += 1
            case Heartbeat() | Drain():
                self._on_word(epoch, message)
            case Ready():
                self._on_ready(epoch, identity, message)
            case StepFailed(kind="fatal"):
                self._stats.step_failures["fatal"] += 1
                self.end_epoch(f"step {message.step} failed: {message.message}")
            case StepResult() | StepFailed():
                self._on_outcome(epoch, identity, message)

    def _on_word(self, epoch: Epoch, message: Heartbeat | Drain) -> None:
        member = next((each for each in epoch.members if each.incarnation == message.incarnation), None)
        if member is None:
            self._stats.stale["rank"] += 1
            return
        epoch.heard_at[member.rank] = time.monotonic()
        if isinstance(message, Drain):
            self._log("rank_drains", rank=member.rank, steps_in_flight=epoch.num_steps)
            epoch.draining = True
            self._events.on_ranks_draining()
            self._end_if_drained(epoch)
        elif message.stats is not None:
            self._stats_of[member.incarnation] = message.stats

    def _on_ready(self, epoch: Epoch, identity: bytes, message: Ready) -> None:
        if not 0 <= message.rank < self._size or epoch.members[message.rank].incarnation != message.incarnation:
            self._stats.stale["rank"] += 1
            return
        epoch.ready[message.rank] = (identity, message.facts)
        epoch.heard_at[message.rank] = time.monotonic()
        if not epoch.is_ready:
            return
        try:
            facts = epoch.final_facts()
        except BadFacts as error:
            self.end_epoch(str(error))
            return
        self._log("ranks_ready", epoch=f"{epoch.id:x}", load_ms=message.load_ms)
        self._events.on_ranks_ready(facts)

    def _on_outcome(self, epoch: Epoch, identity: bytes, outcome: StepResult | StepFailed) -> None:
        leader = epoch.ready.get(LEADER)
        slot = None
        if leader is not None and leader[0] == identity:
            slot = epoch.finish(outcome.step, time.monotonic())
        if slot is None:
            self._stats.stale["rank"] += 1
            return
        self._events.on_outcome(outcome, epoch.arrays(slot))
        self._end_if_drained(epoch)

    def _end_if_drained(self, epoch: Epoch) -> None:
        if epoch.draining and epoch.num_steps == 0 and epoch is self._epoch:
            self.end_epoch("drained", ordered=True)
