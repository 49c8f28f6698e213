"""The lock file beside a Unix socket: says whether a live process owns it. The kernel lets go when its owner dies.

Needed because a dead owner's path has to be unlinked before it can be bound, and the path does not say whether its
owner lives: unlinked, a live one would go deaf without an error. The file of a dead owner is taken over; it never has
to be removed by hand.
"""

import fcntl
import os
from pathlib import Path


class SocketError(RuntimeError):
    """Base of what can go wrong when binding or sending."""


class EndpointInUse(SocketError):
    """Another live process (or another socket of this one) is bound there."""


class EndpointLock:
    """Held from construction to `release`. Raises EndpointInUse at once where another holds it."""

    def __init__(self, socket_path: Path) -> None:
        self.path = socket_path.with_name(socket_path.name + ".lock")
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = -1
        while self._fd < 0:
            self._fd = _try_lock(self.path)

    def release(self) -> None:
        """Removes the file and lets go; harmless when repeated."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _try_lock(path: Path) -> int:
    """The locked descriptor, or -1 when the file was removed by its last owner while we took it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except BlockingIOError:
        os.close(fd)
        raise EndpointInUse(f"{path.with_suffix('')} belongs to a live process: stop it first (lock {path})") from None
    except FileNotFoundError:
        pass
    os.close(fd)
    return -1
