"""Stacks for benchmarks: the real one through `bouquet up`, or its processes one by one around a fake rank.

Each has a free port and a run directory of its own, and is gone, with all of its processes, when its block ends.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from services.config import find_config, load_config
from services.health import http_ready
from services.sources import resolve_source
from services.stack import write_stack

ROOT = Path(__file__).parent.parent
READY_S = 120.0
STOP_S = 30.0
PR_SET_PDEATHSIG = 1
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


# what bouquet.toml says, but for the other models: they would share the cores
ONE_MODEL = """\
[[models]]
name = "{name}"
source = "{source}"

[gateway]
num_gateways = 2
"""


class StackFailed(RuntimeError):
    """A stack did not come up; the text ends with what its processes said last."""


class RunningStack(Struct, frozen=True):
    """What a benchmark needs to know of a stack that serves."""

    url: str
    run_dir: Path
    model: str
    started: float  # seconds since the epoch, just before the first process was started
    ready: float  # and when /health/ready first answered 200
    pids: dict[str, int] = {}  # of the processes started one by one

    @property
    def logs(self) -> list[Path]:
        return sorted((self.run_dir / "logs").glob("*.log"))


def default_model(index: int = 0) -> tuple[str, Path]:
    """Name and directory of a model of the configuration, fetched where it is missing: 0 embeds, 1 chats."""
    config = load_config(find_config(None))
    model = config.models[index]
    return model.name, resolve_source(model.source, Path(config.cache_dir), refresh=False, progress=_quiet)


@contextmanager
def real_stack(overrides: Sequence[str] = (), model: tuple[str, Path] | None = None) -> Iterator[RunningStack]:
    """A stack as a user runs it, of one model alone: name and directory, by default of the first of the configuration.

    `overrides` are as after --set.
    """
    name, directory = model or default_model()  # fetched before the clock starts
    with _run_dir() as home, ExitStack() as processes:
        port = free_port()
        run_dir = home / "run"  # not there yet: a stack starts only where nothing of others is
        config = home / "bench.toml"
        config.write_text(ONE_MODEL.format(name=name, source=directory))
        command = [sys.executable, "-m", "services.cli", "up", "--foreground", "--run-dir", str(run_dir)]
        command += ["--config", str(config)]
        for override in [f"gateway.port={port}", *overrides]:
            command += ["--set", override]
        started = time.time()
        process = processes.enter_context(_process(command, home / "bouquet-up.log", {}))
        _wait_ready(port, [process], home)
        yield RunningStack(f"http://127.0.0.1:{port}", run_dir, name, started, time.time())


@contextmanager
def fake_rank_stack(rank_options: Sequence[str] = ()) -> Iterator[RunningStack]:
    """One real gateway and one real scheduler around a rank that hashes ids into vectors in no time."""
    name, directory = default_model()
    replica = f"{name}/0"
    with _run_dir() as run_dir, ExitStack() as processes:
        port = free_port()
        overrides = [f"gateway.port={port}", "gateway.num_gateways=1", "models[0].replicas=1"]
        config = load_config(find_config(None), overrides, run_dir)
        config = msgspec.structs.replace(config, models=[config.model(name)])
        write_stack(config, {name: directory})
        common = ["--run-dir", str(run_dir)]
        commands = {
            "rank": ["tests.fakes.rank", *common, "--replica", replica, "--rank", "0", *rank_options],
            "scheduler": ["services.scheduler_main", *common, "--model", name, "--replica", replica],
            "gateway": ["services.gateway_main", *common, "--index", "0"],
        }
        started = time.time()
        running = {
            program: processes.enter_context(
                _process([sys.executable, "-m", *command], run_dir / "logs" / f"{program}.log", ONE_THREAD)
            )
            for program, command in commands.items()
        }
        _wait_ready(port, list(running.values()), run_dir)
        ready = time.time()
        pids = {program: process.pid for program, process in running.items()}
        yield RunningStack(f"http://127.0.0.1:{port}", run_dir, name, started, ready, pids)


def end_in_order_when_told() -> None:
    """SIGTERM unwinds like Ctrl-C, so that stacks are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench: told to stop"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _run_dir() -> Iterator[Path]:
    """A private directory with a short path: sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="bqb-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _process(command: list[str], log: Path, environment: dict[str, str]) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that writes to `log` and is asked to end, then made to."""
    with log.open("wb") as output:
        process = _start(command, output, environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(command: list[str], output: BinaryIO, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=ROOT,
        env=os.environ | environment,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """In the child: a benchmark that is killed leaves nothing behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait_ready(port: int, processes: "Sequence[subprocess.Popen[bytes]]", home: Path) -> None:
    deadline = time.monotonic() + READY_S
    reason = ""
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        ready, reason = http_ready("127.0.0.1", port)
        if ready:
            return
        time.sleep(0.02)
    tails = [f"--- {log.stem}\n{_tail(log)}" for log in sorted(home.rglob("*.log"))]
    raise StackFailed("\n".join([f"the stack did not become ready: {reason}", *tails]))


def _tail(log: Path, max_bytes: int = 2000) -> str:
    return log.read_bytes()[-max_bytes:].decode(errors="replace")


def _quiet(_: str) -> None:
    pass
