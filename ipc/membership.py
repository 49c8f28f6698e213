"""The Unix socket on which a rank says Hello and gets Join with the ring's memfd beside it.

Length-prefixed msgpack frames on a stream socket; a descriptor rides with the first byte of its frame. The
kernel tells the peer's pid (SO_PEERCRED), and from the socket each side gets a pidfd: proof of the other's death
that no reuse of pids can fake. The socket stays open as long as both live; its end means that the peer is gone.
"""

import os
import socket
import struct
import time
from pathlib import Path

from msgspec import Struct

from ipc.codec import MEMBERSHIP, Membership, encode
from ipc.endpoint_lock import EndpointLock

_LENGTH = struct.Struct("!I")
_FD = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5
MAX_FRAME_BYTES = 1 << 20
STALL_SECONDS = 1.0  # a frame once begun arrives whole within this, or the peer is given up


class MembershipClosed(ConnectionError):
    """The peer closed the socket or sent what is not a membership message. Nothing more can be read."""


class MembershipSocket:
    """One end of a rank's membership connection; blocking, one message at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.peer_pid: int = _CREDENTIALS.unpack(credentials)[0]

    @classmethod
    def connect(cls, path: os.PathLike[str]) -> "MembershipSocket":
        """Raises OSError (ENOENT, ECONNREFUSED) while no scheduler listens there."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(os.fspath(path))
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    def fileno(self) -> int:
        return self.connection.fileno()

    def pidfd(self) -> int:
        """A descriptor that becomes readable when the peer dies. Raises ProcessLookupError if it has."""
        try:
            return self.connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except ProcessLookupError:
            raise
        except OSError:  # an older kernel: a pid, which could have been used again since
            return os.pidfd_open(self.peer_pid)

    def send(self, message: Struct, fd: int | None = None) -> None:
        """Raises ConnectionError when the peer is gone. `fd` stays open here; the peer gets its own copy."""
        body = encode(message)
        socket.send_fds(self.connection, [_LENGTH.pack(len(body))], [] if fd is None else [fd])
        self.connection.sendall(body)

    def receive(self) -> tuple[Membership, int | None]:
        """One message and the descriptor beside it, if any; the caller closes it.

        Raises TimeoutError when the socket has a timeout and no frame began (try again later), and
        MembershipClosed; then no descriptor stays open.
        """
        fds: list[int] = []
        try:
            # not socket.recv_fds: it drops the flags
            space = socket.CMSG_LEN(_FD.size)
            head, ancillary, flags, _ = self.connection.recvmsg(_LENGTH.size, space, socket.MSG_CMSG_CLOEXEC)
            for _, _, data in ancillary:  # SCM_RIGHTS: the only kind that nobody has to ask for
                fds += [fd for (fd,) in _FD.iter_unpack(data[: len(data) - len(data) % _FD.size])]
            if flags & socket.MSG_CTRUNC:
                raise MembershipClosed("more than one descriptor beside a frame")
            return self._rest(head), (fds.pop() if fds else None)
        except TimeoutError:
            raise
        except BlockingIOError:
            raise TimeoutError("no frame has begun") from None
        except (OSError, ValueError) as error:
            raise MembershipClosed(str(error)) from error
        finally:
            for fd in fds:  # those that were not handed out
                os.close(fd)

    def close(self) -> None:
        self.connection.close()

    def _rest(self, head: bytes) -> Membership:
        if not head:
            raise MembershipClosed("peer closed the connection")
        timeout, deadline = self.connection.gettimeout(), time.monotonic() + STALL_SECONDS
        try:
            (length,) = _LENGTH.unpack(head + self._read(_LENGTH.size - len(head), deadline))
            if length > MAX_FRAME_BYTES:
                raise MembershipClosed(f"frame of {length} bytes, the limit is {MAX_FRAME_BYTES}")
            return MEMBERSHIP.decode(self._read(length, deadline))
        finally:
            self.connection.settimeout(timeout)

    def _read(self, count: int, deadline: float) -> bytes:
        chunks = []
        while count:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self.connection.recv(count)
            except TimeoutError:
                raise MembershipClosed(f"peer stopped {count} bytes before the end of a frame") from None
            if not chunk:
                raise MembershipClosed("peer closed the connection within a frame")
            chunks.append(chunk)
            count -= len(chunk)
        return b"".join(chunks)


class MembershipListener:
    """The scheduler's end: one for the life of the process. Raises EndpointInUse while another live one has `path`."""

    def __init__(self, path: Path, backlog: int = 128) -> None:
        self._path = path
        self._lock = EndpointLock(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)  # of a dead owner: the lock is ours
            self._socket.bind(os.fspath(path))
            self._socket.listen(backlog)
            self._socket.setblocking(False)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> MembershipSocket | None:
        """The next rank that connected, or None. It may stay silent: watch its fileno before `receive`."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        connection.setblocking(True)
        return MembershipSocket(connection)

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)
        self._lock.release()
