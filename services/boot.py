"""What every supervised process does around its own work: title, limits, log, crash guard, exit code."""

import argparse
import ctypes
import gc
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import setproctitle

from ipc.addresses import config_file, crash_file
from services.config import RunConfig, read_run_config
from services.config_checks import ConfigError
from services.crash_guard import CrashGuard
from services.log import Log, capture_logging
from services.programs import Program

EXIT_ORDERED = 0
EXIT_CRASHED = 1
EXIT_CANNOT_BOOT = 78  # EX_CONFIG: trying again without a change is useless

PR_SET_PDEATHSIG = 1


class CannotBoot(RuntimeError):
    """The process can never start with this configuration; the text says what to change."""


def run_program(program: Program, run_dir: Path, body: Callable[[RunConfig, Log], int]) -> int:
    """Runs `body(run, log)` as `program` and returns the exit code it should end with.

    After CannotBoot the next start waits; after several early crashes it does, too.
    """
    setproctitle.setproctitle(program.title)
    os.umask(0o077)
    raise_descriptor_limit()
    log = Log(program.name)
    capture_logging(log)
    if not die_with_supervisor(run_dir):
        log("orphan", level="error", message="supervisord is gone; not starting")
        return EXIT_CRASHED
    guard = CrashGuard(crash_file(run_dir, program.name))
    log("started", pid=os.getpid())
    try:
        if waited := guard.begin():
            log("held_back", level="warning", seconds=round(waited, 1), message="it died young several times")
        code = body(read_run_config(config_file(run_dir)), log)
    except (CannotBoot, ConfigError) as error:
        guard.refuse(str(error))
        log("cannot_boot", level="error", message=str(error))
        return EXIT_CANNOT_BOOT
    except Exception as error:  # noqa: BLE001 - the process's outermost frame: whatever it was, say it and end
        log.failure("crashed", error)
        return EXIT_CRASHED
    if code == EXIT_ORDERED:
        guard.forgive()
    log("exit", code=code)
    return code


def arguments(description: str, *names: str) -> argparse.Namespace:
    """The command line of a process: --run-dir, and the given ones of --model, --replica, --rank, --index."""
    kinds: dict[str, type[int] | type[str]] = {"model": str, "replica": str, "rank": int, "index": int}
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run-dir", type=Path, required=True, help="holds config.json, written by bouquet up")
    for name in names:
        parser.add_argument(f"--{name}", type=kinds[name], required=True)
    return parser.parse_args()


def die_with_supervisor(run_dir: Path) -> bool:
    """Has the kernel kill this process when its parent dies. False if that parent is gone already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    try:
        supervisor = int((run_dir / "supervisord.pid").read_text())
    except (OSError, ValueError):
        return True  # started by hand
    return os.getppid() == supervisor


def raise_descriptor_limit() -> None:
    """Connections and rings need descriptors; take all that the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def settle_memory() -> None:
    """After the imports: their objects live for ever, so the collector need not look at them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
