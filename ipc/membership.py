"""The Unix socket on which a rank says Hello and gets Join with the ring's memfd beside it.

Length-prefixed msgpack frames on a stream socket; a descriptor rides with the first byte of its frame. The
kernel tells the peer's pid (SO_PEERCRED), and from it each side holds a pidfd: proof of the other's death that
no reuse of pids can fake. The socket stays open as long as both live; its end means that the peer is gone.
"""

import os
import socket
import struct

from msgspec import Struct

from ipc.codec import MEMBERSHIP, Membership, encode

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 1 << 20


class MembershipClosed(ConnectionError):
    """The peer closed the socket or sent what is not a membership message."""


class MembershipSocket:
    """One end of a rank's membership connection; blocking, one message at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.peer_pid: int = struct.unpack("3i", credentials)[0]

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
        return os.pidfd_open(self.peer_pid)

    def send(self, message: Struct, fd: int | None = None) -> None:
        body = encode(message)
        socket.send_fds(self.connection, [_LENGTH.pack(len(body))], [] if fd is None else [fd])
        self.connection.sendall(body)

    def receive(self) -> tuple[Membership, int | None]:
        """One message and the descriptor beside it, if any. Raises MembershipClosed, TimeoutError."""
        try:
            head, fds, _, _ = socket.recv_fds(self.connection, _LENGTH.size, 1)
            try:
                head += self._read(_LENGTH.size - len(head))
                (length,) = _LENGTH.unpack(head)
                if length > MAX_FRAME_BYTES:
                    raise MembershipClosed(f"frame of {length} bytes")
                return MEMBERSHIP.decode(self._read(length)), (fds[0] if fds else None)
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:
            raise MembershipClosed(str(error)) from error

    def close(self) -> None:
        self.connection.close()

    def _read(self, count: int) -> bytes:
        chunks = []
        while count:
            chunk = self.connection.recv(count)
            if not chunk:
                raise MembershipClosed("peer closed the connection")
            chunks.append(chunk)
            count -= len(chunk)
        return b"".join(chunks)
