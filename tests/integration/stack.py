"""A whole stack for a test: real supervisord, real gateways and schedulers; ranks real or fake."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.config import ServiceConfig, build_config
from services.health import http_ready
from services.listening import listens
from services.render import replica_file
from services.run_dir import take_lock
from services.stack import start_supervisord, stop_supervisord, stop_timeout_s, write_stack
from services.supervisor_client import ProcessInfo, SupervisorClient

PROJECT = Path(__file__).parent.parent.parent
CLI_SECONDS = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Stack:
    """Started by `start`, stopped by `stop`; `kill` and `restart_program` are what tests do to it between."""

    def __init__(
        self,
        run_dir: Path,
        directories: dict[str, Path],
        *,
        fake_rank: list[str] | None = None,
        num_gateways: int = 1,
        replicas: int = 1,
        tensor_parallel_size: int = 1,
        scheduler: dict[str, Any] | None = None,
        gateway: dict[str, Any] | None = None,
        rank: dict[str, Any] | None = None,
    ) -> None:
        self.run_dir, self.directories, self.fake_rank = run_dir, directories, fake_rank
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        raw = {
            "gateway": {"port": self.port, "num_gateways": num_gateways, **(gateway or {})},
            "scheduler": scheduler or {},
            "rank": {"device": "cpu", "num_threads": 1, **(rank or {})},
            "models": [
                {
                    "name": name,
                    "source": str(directory),
                    "replicas": replicas,
                    "tensor_parallel_size": tensor_parallel_size,
                }
                for name, directory in directories.items()
            ],
        }
        self.config: ServiceConfig = build_config(raw, PROJECT, run_dir)
        self._supervisord: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Stack":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        lock_fd = take_lock(self.run_dir)
        write_stack(self.config, self.directories)
        self.prepare()
        if self.fake_rank is not None:
            for name, model in ((model.name, model) for model in self.config.models):
                for index in range(model.replicas):
                    self._fake_ranks(replica_file(self.run_dir, f"{name}/{index}"))
        self._supervisord = start_supervisord(self.run_dir, lock_fd, with_parent=True)
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def prepare(self) -> None:
        """For tests that change programs: their files are written, nothing runs yet."""

    def stop(self) -> None:
        stop_supervisord(self.run_dir, stop_timeout_s(self.config), print)
        assert self._supervisord is not None
        self._supervisord.wait(30)

    def wait_ready(self, seconds: float = 60.0) -> float:
        """Waits until /health/ready is 200 and every gateway listens; returns how long it took.

        Raises TimeoutError with the logs' ends.
        """
        started = time.monotonic()
        reason = ""
        while time.monotonic() - started < seconds:
            ready, reason = http_ready("127.0.0.1", self.port)
            if ready and self._gateways_listen():
                return time.monotonic() - started
            time.sleep(0.05)
        raise TimeoutError(f"not ready after {seconds} s: {reason}\n{self.log_ends()}")

    def _gateways_listen(self) -> bool:
        gateways = [info for name, info in self.processes().items() if name.startswith("gateways:")]
        return all(info.pid and listens(info.pid, self.port) for info in gateways)

    def processes(self) -> dict[str, ProcessInfo]:
        """Full program name (`group:process`) → what supervisord knows."""
        with SupervisorClient(self.run_dir) as client:
            return {process.full_name: process for process in client.processes()}

    def pid(self, full_name: str) -> int:
        return self.processes()[full_name].pid

    def kill(self, full_name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to a program; returns the pid it had."""
        pid = self.pid(full_name)
        assert pid > 0, f"{full_name} does not run"  # 0 would be our own group
        os.kill(pid, number)
        return pid

    @property
    def supervisord_pid(self) -> int:
        assert self._supervisord is not None
        return self._supervisord.pid

    def kill_supervisord(self) -> None:
        assert self._supervisord is not None
        self._supervisord.kill()
        self._supervisord.wait(10)

    def restart_program(self, full_name: str) -> None:
        """What `supervisorctl restart` does."""
        with SupervisorClient(self.run_dir) as client:
            client.stop(full_name)
            client.start(full_name)

    def cli(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs `bouquet …` on this stack."""
        command = [sys.executable, "-m", "services.cli", *arguments, "--run-dir", str(self.run_dir)]
        return subprocess.run(command, capture_output=True, text=True, timeout=CLI_SECONDS, cwd=PROJECT, check=False)

    def embed(self, model: str, rows: list[list[int]]) -> list[NDArray[np.float32]]:
        """The vectors of `rows`, each asked for alone."""
        vectors = []
        for row in rows:
            body = json.dumps({"model": model, "input": row, "encoding_format": "float"}).encode()
            request = urllib.request.Request(f"{self.url}/v1/embeddings", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as response:
                vectors.append(np.array(json.load(response)["data"][0]["embedding"], np.float32))
        return vectors

    def log_ends(self) -> str:
        """The last lines of every log, for a failing test's message."""
        paths = sorted((self.run_dir / "logs").glob("*"))
        return "\n".join(f"--- {p.name}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-8:]) for p in paths)

    def events(self, program: str) -> list[dict[str, Any]]:
        """The JSON lines of a program's log."""
        lines = (self.run_dir / "logs" / f"{program}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def _fake_ranks(self, file: Path) -> None:
        """Replaces the commands of the ranks in a replica's program file by fake ones."""

        def fake(match: re.Match[str]) -> str:
            options = dict(re.findall(r"--(replica|rank)=(\S+)", match[0]))
            command = [sys.executable, "-m", "tests.fakes.rank", "--run-dir", str(self.run_dir)]
            command += ["--replica", options["replica"], "--rank", options["rank"], *(self.fake_rank or [])]
            return "command=" + shlex.join(command).replace("%", "%%")

        text = re.sub(r"^command=.*services\.rose_main.*$", fake, file.read_text(), flags=re.M)
        file.write_text(with_project(text))


def with_project(text: str) -> str:
    """A program file whose programs find the tests' modules."""
    return text.replace("environment=", f'environment=PYTHONPATH="{PROJECT}",')


def descendants(pid: int) -> set[int]:
    """Live processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
