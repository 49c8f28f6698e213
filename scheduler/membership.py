"""Who the ranks are: the Unix listener on which they say Hello, and proof of their life and death (pidfds).

Knows pids, incarnations and facts; knows nothing of epochs, steps or what a rank is for.
"""

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from ipc.control import Hello
from ipc.membership import MembershipListener, MembershipSocket
from ipc.types import PROTOCOL_VERSION, ModelFacts


class Member:
    """One rank process, from its Hello to its death."""

    def __init__(self, channel: MembershipSocket, hello: Hello, facts: ModelFacts, pidfd: int) -> None:
        self.rank = hello.index
        self.incarnation = hello.incarnation
        self.pid = channel.peer_pid
        self.facts = facts
        self.channel = channel
        self.pidfd = pidfd
        self.gone = False

    def send(self, message: Struct, fd: int | None = None) -> bool:
        """False when it cannot be reached any more: its end is being noticed elsewhere."""
        try:
            self.channel.send(message, fd)
        except OSError:
            return False
        return True

    def dead(self) -> bool:
        return self.gone or bool(select.select([self.pidfd], [], [], 0)[0])

    def stopped(self) -> bool:
        """Whether somebody has halted it (SIGSTOP): it says nothing, and whoever computes with it waits."""
        with contextlib.suppress(OSError):
            return (Path("/proc") / str(self.pid) / "stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def kill(self) -> None:
        if not self.gone:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class Membership:
    """Accepts ranks; calls `on_hello(member)`, `on_hangup(member)` at the end of its connection, `on_death(member)`.

    The last two come at most once for each, a hang-up before a death; after `dismiss` neither does.
    """

    def __init__(
        self,
        path: Path,
        on_hello: Callable[[Member], None],
        on_hangup: Callable[[Member], None],
        on_death: Callable[[Member], None],
        log: Callable[..., None],
    ) -> None:
        """Raises ipc.sockets.EndpointInUse if another scheduler serves this replica."""
        self._on_hello = on_hello
        self._on_hangup = on_hangup
        self._on_death = on_death
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._waiting: set[MembershipSocket] = set()  # connected, not a word yet
        self._members: set[Member] = set()
        self._last_refusal = (0, "")
        self._listener = MembershipListener(path)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Lets go of every rank: they see the end of the socket and say Hello to a successor."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for channel in list(self._waiting):
            self._forget(channel)
        for member in list(self._members):
            self._release(member)

    def dismiss(self, member: Member, reason: str) -> None:
        """Closes the connection of a rank that has no place here; it may try again."""
        if self._last_refusal != (member.pid, reason):  # it knocks ten times a second
            self._last_refusal = (member.pid, reason)
            self._log("rank_refused", level="warning", rank=member.rank, pid=member.pid, reason=reason)
        self._release(member)

    def _accept(self) -> None:
        channel = self._listener.accept()
        if channel is not None:
            self._waiting.add(channel)
            self._loop.add_reader(channel.fileno(), self._read_hello, channel)

    def _read_hello(self, channel: MembershipSocket) -> None:
        self._loop.remove_reader(channel.fileno())
        self._waiting.discard(channel)
        try:
            member = _welcome(channel)
        except (OSError, ValueError) as error:  # closed, too slow, dead, or no rank
            channel.close()
            self._log("hello_refused", level="warning", pid=channel.peer_pid, reason=str(error))
            return
        self._members.add(member)
        self._loop.add_reader(member.pidfd, self.reap, member)
        self._loop.add_reader(channel.fileno(), self._hang_up, member)
        self._on_hello(member)

    def reap(self, member: Member) -> None:
        """Takes notice of a death now."""
        if self._release(member):
            self._on_death(member)

    def _hang_up(self, member: Member) -> None:
        """A rank says nothing more here: its connection has ended, and its process ends or is about to."""
        self._loop.remove_reader(member.channel.fileno())
        self._on_hangup(member)

    def _release(self, member: Member) -> bool:
        """Closes what we hold of it; False if that has been done."""
        if member.gone:
            return False
        member.gone = True
        self._members.discard(member)
        self._loop.remove_reader(member.pidfd)
        os.close(member.pidfd)
        self._forget(member.channel)
        return True

    def _forget(self, channel: MembershipSocket) -> None:
        self._waiting.discard(channel)
        self._loop.remove_reader(channel.fileno())
        channel.close()


def _welcome(channel: MembershipSocket) -> Member:
    """Reads Hello. Raises ValueError if it is not a rank's, or not of this protocol."""
    hello, fd = channel.receive()
    if fd is not None:
        os.close(fd)
    if not isinstance(hello, Hello) or hello.role != "rank" or hello.facts is None:
        raise ValueError("expected a rank's Hello with facts")
    if hello.protocol != PROTOCOL_VERSION:
        raise ValueError(f"it speaks protocol {hello.protocol}, this scheduler {PROTOCOL_VERSION}: restart it")
    return Member(channel, hello, hello.facts, channel.pidfd())
