"""The foreground: what it shows, and what one and two signals do."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.config import build_config
from services.foreground import MAX_LINES, Foreground
from services.signals import STOP_SIGNALS

STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.sigwait([10])"
ORDERLY = "import signal; signal.signal(15, lambda *_: exit(0)); print('up', flush=True); signal.pause()"


class World:
    def __init__(self, run_dir: Path) -> None:
        config = build_config({"models": [{"name": "m", "source": "/m"}]}, Path("/"), run_dir)
        self.log = run_dir / "logs" / "gateway-0.log"
        self.log.parent.mkdir()
        self.said: list[str] = []
        self.foreground = Foreground(config, self.said.append)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, code: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def write(self, event: str, level: str = "info", **fields: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"level": level, "event": event, **fields}) + "\n")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    made = World(tmp_path)
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)
    for process in made.processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def signal_soon(number: signal.Signals = signal.SIGINT, delay_s: float = 0.05) -> None:
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def test_a_start_is_shown_phase_by_phase(world: World) -> None:
    world.write("started", pid=1)
    world.write("imported")
    with world.log.open("a") as file:
        file.write("not one of ours\n")
    world.foreground.show_start()
    assert [line.split("s  ", 1)[1].split()[1:] for line in world.said] == [["started", "pid=1"], ["imported"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_watching_ends_with_a_signal_and_shows_what_is_loud(world: World, number: signal.Signals) -> None:
    world.write("replicas_changed")
    world.write("step_fault", level="error", step=3)
    for _ in range(MAX_LINES + 5):
        world.write("slow", level="warning")
    signal_soon(number, 0.5)
    world.foreground.watch(world.start(ORDERLY))
    assert "ERROR step_fault  step=3" in world.said[0]
    assert world.said[-1] == "… 6 more in the logs"
    assert not any("replicas_changed" in line for line in world.said)


def test_watching_ends_when_supervisord_ends(world: World) -> None:
    process = world.start(ORDERLY)
    process.kill()
    process.wait()
    world.foreground.watch(process)


def test_a_stop_is_in_order(world: World) -> None:
    process = world.start(ORDERLY)
    assert world.foreground.stop(process, timeout_s=10)
    assert process.returncode == 0


def test_a_second_signal_kills(world: World) -> None:
    process = world.start(STUBBORN)
    signal_soon()
    assert not world.foreground.stop(process, timeout_s=30)
    assert process.returncode == -signal.SIGKILL


def test_a_stop_that_takes_too_long_kills(world: World) -> None:
    process = world.start(STUBBORN)
    assert not world.foreground.stop(process, timeout_s=0.1)
    assert process.returncode == -signal.SIGKILL
