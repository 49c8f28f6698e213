"""`bouquet up --foreground`: a running stack as one command in a terminal, until Ctrl-C or the stack ends."""

import os
import select
import signal
import subprocess
import time
from pathlib import Path

from services.config import ServiceConfig
from services.log_tail import Line, LogTail, describe
from services.signals import stop_descriptor
from services.stack import Say, logs_dir

TICK_S = 0.3
MAX_LINES = 20  # shown per tick; the files have them all
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOUD = ("warning", "error", "critical")
LIFE_EVENTS = ("started", "ready", "exit")


class Foreground:
    """Signals, and the lines shown while the stack lives."""

    def __init__(self, config: ServiceConfig, say: Say) -> None:
        self._signals = stop_descriptor(SIGNALS)
        self._tail = LogTail(logs_dir(Path(config.run_dir)))
        self._say = say
        self._started = time.monotonic()

    def stop_asked(self, timeout_s: float) -> bool:
        """Sleeps up to `timeout_s`; true as soon as a stop signal has come."""
        if not select.select([self._signals], [], [], timeout_s)[0]:
            return False
        os.eventfd_read(self._signals)
        return True

    def show_start(self) -> None:
        """Every phase of every process, as it comes."""
        for line in self._tail.lines():
            if line.fields:
                self._show(line)

    def watch(self, supervisord: "subprocess.Popen[bytes]") -> None:
        """Shows starts, ends and whatever is loud until a stop is asked for or supervisord ends."""
        while supervisord.poll() is None and not self.stop_asked(TICK_S):
            lines = [line for line in self._tail.lines() if line.level in LOUD or line.event in LIFE_EVENTS]
            for line in lines[:MAX_LINES]:
                self._show(line)
            if len(lines) > MAX_LINES:
                self._say(f"… {len(lines) - MAX_LINES} more in the logs")

    def stop(self, supervisord: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
        """Drains and stops; a second signal, or the time, kills. True if the stop was in order."""
        if supervisord.poll() is None:
            supervisord.terminate()
        deadline = time.monotonic() + timeout_s
        while supervisord.poll() is None:
            if self.stop_asked(TICK_S) or time.monotonic() > deadline:
                supervisord.kill()  # the kernel kills its children
                supervisord.wait()
                return False
        return supervisord.returncode == 0

    def _show(self, line: Line) -> None:
        mark = "" if line.level == "info" else f"{line.level.upper()} "
        self._say(f"{time.monotonic() - self._started:7.2f} s  {line.program:<32} {mark}{describe(line):.300}")
