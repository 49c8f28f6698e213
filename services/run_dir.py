"""The run directory of a stack: claimed by its start, locked while it runs, cleaned when it has ended.

Only a start claims one, and only in a directory that holds nothing. What has not been claimed is never changed: other
people's directories hold files of the same names.
"""

import fcntl
import os
import shutil
import time
from pathlib import Path

from ipc.addresses import config_file, replicas_file

MARK = "bouquet.lock"  # says that a stack made this directory, and is what supervisord locks
LOCK_WAIT_S = 3.0


class StackError(RuntimeError):
    """Something a person must know or do; the text says what."""


def is_claimed(run_dir: Path) -> bool:
    """Whether a stack has been started there."""
    return (run_dir / MARK).is_file()


def check_run_dir(run_dir: Path) -> None:
    """Raises StackError for a directory that no stack can be started in; changes nothing."""
    try:
        names = os.listdir(run_dir)
        foreign = run_dir.stat().st_uid != os.getuid()
    except FileNotFoundError:
        above = next(parent for parent in run_dir.absolute().parents if parent.exists())
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            wrong = "no directory may be made in it" if above.is_dir() else "it is not a directory"
            raise StackError(f"{run_dir} cannot be made in {above}: {wrong}; choose another run_dir") from None
        return
    except OSError as error:
        raise StackError(f"{run_dir} cannot be made: {error.strerror}; choose another run_dir") from None
    if foreign:
        raise StackError(f"{run_dir} belongs to another user; choose another run_dir")
    if names and MARK not in names:
        raise StackError(
            f"{run_dir} holds files that are not a stack's ({min(names)!r}; no {MARK}), and stopping a stack removes "
            "files: choose another run_dir, one that is empty or is not there yet"
        )


def claim(run_dir: Path) -> None:
    """Makes the directory a run directory, of its owner alone. Raises StackError for one that holds other things."""
    check_run_dir(run_dir)
    make_private(run_dir)
    os.close(os.open(run_dir / MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def take_lock(run_dir: Path, wait_s: float = LOCK_WAIT_S) -> int:
    """Claims the run directory and returns its lock, as a descriptor. Raises StackError if a live stack has it."""
    claim(run_dir)
    fd = os.open(run_dir / MARK, os.O_RDWR | os.O_CLOEXEC)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
        os.close(fd)
        raise StackError(
            f"a stack is already running in {run_dir}: `bouquet down` stops it, "
            "`--run-dir` and another gateway.port start a second one"
        )


def clean(run_dir: Path) -> None:
    """Removes everything of a stack that has ended but its logs and the mark. The caller holds the lock.

    Raises StackError, and removes nothing, where no stack was started.
    """
    if not is_claimed(run_dir):
        raise StackError(f"no stack was started in {run_dir}; nothing in it is removed")
    for name in ("programs", "replicas", "starts"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    files = [replicas_file(run_dir), config_file(run_dir)]
    files += [run_dir / name for name in ("supervisord.conf", "supervisord.pid", "supervisor.sock", "ops.lock")]
    for path in [*files, *run_dir.glob("supervisor.sock.*"), *run_dir.glob("*.tmp")]:
        path.unlink(missing_ok=True)


def make_private(directory: Path) -> None:
    """A directory that only this user may enter. Raises StackError."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StackError(f"{directory} cannot be made: {error.strerror}; choose another run_dir") from None
    if directory.stat().st_uid != os.getuid():
        raise StackError(f"{directory} belongs to another user; choose another run_dir")
    directory.chmod(0o700)
