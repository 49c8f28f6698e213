"""Slows a program down that keeps dying young, and remembers why it could not boot.

supervisord restarts at once and for ever whatever lives longer than its startsecs; this holds such a program
back. State is one small file per program, written by the program itself.
"""

import os
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

WINDOW_S = 300.0  # deaths older than this are forgotten
YOUNG_S = 30.0  # a life longer than this was no boot failure
FREE_DEATHS = 2  # the first deaths cost nothing: a killed process is back at once
MAX_DELAY_S = 30.0


class History(Struct):
    """What a program's file holds. Times are seconds since the epoch."""

    starts: list[float] = []  # of the lives not ended by an ordered stop, oldest first
    num_starts: int = 0  # since the stack came up
    boot_error: str = ""  # why the last start failed, if the configuration was at fault


class CrashGuard:
    """One program's history. `begin` at start, `forgive` at an ordered stop, `refuse` when it can never boot."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._path = path
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._history = read_history(path)

    def begin(self) -> float:
        """Waits as long as the history asks for, records the start, and returns the seconds waited."""
        now = self._clock()
        history = self._history
        history.starts = [start for start in history.starts if now - start < WINDOW_S]
        delay = self.delay(now)
        if delay:
            self._sleep(delay)
        history.starts.append(now + delay)
        history.num_starts += 1
        history.boot_error = ""
        self._write()
        return delay

    def delay(self, now: float) -> float:
        """min(2^k, 30) s after k young deaths beyond the free ones, give or take a quarter."""
        if self._history.boot_error:
            return self._jittered(MAX_DELAY_S)
        young = sum(end - start < YOUNG_S for start, end in pairwise([*self._history.starts, now]))
        excess = young - FREE_DEATHS
        return self._jittered(min(2.0**excess, MAX_DELAY_S)) if excess > 0 else 0.0

    def forgive(self) -> None:
        """An ordered stop: nothing of this life counts."""
        self._history.starts.clear()
        self._write()

    def refuse(self, error: str) -> None:
        """The configuration is at fault; the next start waits the full time."""
        self._history.boot_error = error
        self._write()

    def _jittered(self, seconds: float) -> float:
        return min(seconds * (0.75 + 0.5 * self._jitter()), MAX_DELAY_S)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(self._history))
        os.replace(temporary, self._path)


def read_history(path: Path) -> History:
    """The history in `path`; a missing or damaged file is an empty one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=History)
    except (OSError, msgspec.MsgspecError):
        return History()
