"""supervisord itself, holding the run directory's lock for as long as it lives."""

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

import setproctitle
from supervisor import loggers, supervisord

from services.boot import PR_SET_PDEATHSIG

LOCK_FD = 3  # supervisord closes what is above when it reloads; its children close this one too


def main() -> None:
    parser = argparse.ArgumentParser(description="supervisord of one stack; started by `bouquet up`.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--lock-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, default=0, help="stop in order when this process dies")
    given = parser.parse_args()
    if given.lock_fd != LOCK_FD:
        os.dup2(given.lock_fd, LOCK_FD)
        os.close(given.lock_fd)
    if given.parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != given.parent:
            sys.exit(1)
    os.umask(0o077)
    survive_full_disk()
    setproctitle.setproctitle("bouquet: supervisord")
    supervisord.main(["--configuration", str(given.run_dir / "supervisord.conf")])


def survive_full_disk() -> None:
    """A log line that cannot be written is lost. By default supervisord reports it on stderr, which lies on the same
    disk, and ends by the error of that, and with it every process."""
    loggers.Handler.handleError = lambda handler: None


if __name__ == "__main__":
    main()
