"""Slows a program down that keeps dying young, and remembers why it could not boot.

supervisord restarts at once and for ever whatever lives longer than its startsecs; this holds such a program
back. State is one small file per program, written by the program itself.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

WINDOW_S = 300.0  # deaths older than this are forgotten
YOUNG_S = 15.0  # a program that lives longer starts seldom enough; above supervisord's startsecs
FREE_DEATHS = 3  # the first deaths cost nothing: a killed process is back at once
MAX_DELAY_S = 30.0


class History(Struct):
    """What a program's file holds. Times are seconds since the epoch."""

    started: float = 0.0  # the life that runs, or ended in disorder; 0: it ended in order
    young_deaths: list[float] = []  # in the window, oldest first
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
        if history.started and now - history.started < YOUNG_S:
            history.young_deaths.append(now)
        history.young_deaths = [death for death in history.young_deaths if now - death < WINDOW_S]
        delay = self._delay()
        if delay:
            self._sleep(delay)
        history.started = now + delay
        history.num_starts += 1
        history.boot_error = ""
        self._write()
        return delay

    def forgive(self) -> None:
        """An ordered stop: what was before it counts no more."""
        self._history.started = 0.0
        self._history.young_deaths.clear()
        self._write()

    def refuse(self, error: str) -> None:
        """The configuration is at fault; the next start waits the full time."""
        self._history.boot_error = error
        self._write()

    def _delay(self) -> float:
        """min(2^k, 30) s after k young deaths beyond the free ones, give or take a quarter."""
        if self._history.boot_error:
            return self._jittered(MAX_DELAY_S)
        excess = len(self._history.young_deaths) - FREE_DEATHS
        return self._jittered(min(2.0**excess, MAX_DELAY_S)) if excess > 0 else 0.0

    def _jittered(self, seconds: float) -> float:
        return min(seconds * (0.75 + 0.5 * self._jitter()), MAX_DELAY_S)

    def _write(self) -> None:
        """Best effort: a full disk must not keep a program from starting."""
        temporary = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_bytes(msgspec.json.encode(self._history))
            os.replace(temporary, self._path)


def read_history(path: Path) -> History:
    """The history in `path`; a missing or damaged file is an empty one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=History)
    except (OSError, msgspec.MsgspecError):
        return History()
