"""A stack on one run directory: made ready, started, watched until it serves, stopped, cleaned up.

Layout of a run directory (0700):

    bouquet.lock      says that a stack made it; held by supervisord for its life: one stack at a time
    supervisord.conf  programs/*.conf  supervisor.sock  supervisord.pid
    config.json       replicas.json    replicas/<replica>/*.sock
    starts/<program>.json              crash guards
    logs/<program>.log                 kept when the stack stops
"""

import errno
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ipc.addresses import config_file, crash_file, replica_id
from services.config import RunConfig, ServiceConfig, write_run_config
from services.cores import share_cores
from services.crash_guard import read_history
from services.files import write_private
from services.health import http_ready, reachable
from services.log_tail import last_lines
from services.programs import Program, gateway_program, replica_programs
from services.render import gateway_config, main_config, num_cores, programs_dir, replica_config, replica_file
from services.replicas import ReplicaTable, write_replicas
from services.run_dir import StackError, claim, clean, make_private, take_lock
from services.supervisor_client import SupervisorClient, SupervisorGone, SupervisorHangs, SupervisorRefused

PORT_WAIT_S = 5.0
DEATHS_BEFORE_GIVING_UP = 3
PATIENCE_S = 10.0  # of a start; after that it says what it waits for

Say = Callable[[str], None]


def logs_dir(run_dir: Path) -> Path:
    return run_dir / "logs"


def write_stack(config: ServiceConfig, directories: dict[str, Path]) -> None:
    """Cleans what a dead stack left and writes all files of a new one. The caller holds the lock.

    Raises StackError, and changes nothing, for a directory that holds other things.
    """
    run_dir = Path(config.run_dir)
    config = share_cores(config, num_cores())
    claim(run_dir)
    clean(run_dir)
    for directory in (programs_dir(run_dir), logs_dir(run_dir), run_dir / "starts", run_dir / "replicas"):
        make_private(directory)
    paths = {name: str(path) for name, path in directories.items()}
    write_run_config(config_file(run_dir), RunConfig(config, paths))
    table = ReplicaTable()
    for model in config.models:
        for index in range(model.replicas):
            replica = replica_id(model.name, index)
            write_private(replica_file(run_dir, replica), replica_config(config, model, replica, run_dir))
            table.add(run_dir, model.name, replica)
    write_replicas(run_dir, table)
    write_private(programs_dir(run_dir) / "gateways.conf", gateway_config(config, run_dir))
    write_private(run_dir / "supervisord.conf", main_config(run_dir))


def check_host(host: str) -> None:
    """Raises StackError unless this machine can listen on it."""
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise StackError(
            f"gateway.host: this machine cannot listen on {host!r}: {error.strerror}; give one of its own addresses, "
            "0.0.0.0 for all"
        ) from None


def wait_for_port(host: str, port: int) -> None:
    """Raises StackError if somebody else listens there; SO_REUSEPORT would share the port in silence."""
    deadline = time.monotonic() + PORT_WAIT_S
    while True:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise StackError(
                        f"cannot listen on {host}:{port}: {error.strerror}; stop what listens there or choose another "
                        "address (make serve PORT=…, --set gateway.port=…)"
                    ) from None
        time.sleep(0.1)


def start_supervisord(run_dir: Path, lock_fd: int, *, with_parent: bool) -> "subprocess.Popen[bytes]":
    """Starts supervisord in a session of its own and hands it the lock. `with_parent`: it stops when we die."""
    command = [sys.executable, "-m", "services.supervisord_main", f"--run-dir={run_dir}", f"--lock-fd={lock_fd}"]
    command += [f"--parent={os.getpid()}"] if with_parent else []
    with (logs_dir(run_dir) / "supervisord.err").open("wb") as errors:
        process = subprocess.Popen(
            command,
            pass_fds=[lock_fd],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
    os.close(lock_fd)
    return process


def stack_programs(config: ServiceConfig, table: ReplicaTable) -> list[Program]:
    """All programs of a stack: of every replica in `table`, and the gateways."""
    programs = []
    for model in config.models:
        for replica in table.ids(model.name):
            programs += replica_programs(replica, model.tensor_parallel_size)
    return programs + [gateway_program(index) for index in range(config.gateway.num_gateways)]


class StartWatch:
    """Looks at a starting stack until it serves or never will."""

    def __init__(self, config: ServiceConfig, supervisord: "subprocess.Popen[bytes]", programs: list[Program]) -> None:
        self._config = config
        self._run_dir = Path(config.run_dir)
        self._supervisord = supervisord
        self._programs = programs
        self._pids: dict[str, set[int]] = {program.full_name: set() for program in programs}
        self._reason = self._told = ""  # why it does not serve yet
        self._began = time.monotonic()

    def news(self) -> str:
        """Why it does not serve yet, once per reason and not while a start is as quick as ever; else "".

        Numbers in it, which count up, make no new reason.
        """
        reason = re.sub(r"\d+", "", self._reason)
        if reason == self._told or time.monotonic() - self._began < PATIENCE_S:
            return ""
        self._told = reason
        return self._reason

    def ready(self) -> bool:
        """One look: whether the stack serves. Raises StackError when it never will."""
        if self._supervisord.poll() is not None:
            logs = logs_dir(self._run_dir)
            lines = last_lines(logs / "supervisord.err") + last_lines(logs / "supervisord.log", 5)
            raise StackError("supervisord ended:\n" + "\n".join(f"    {line}" for line in lines))
        try:
            with SupervisorClient(self._run_dir) as client:
                processes = client.processes()  # also wakes it: by itself it looks around once a second
        except (SupervisorGone, SupervisorRefused):  # not up yet, or being stopped by another command
            return False
        check_programs(self._run_dir, self._programs)
        for info in processes:
            self._pids.setdefault(info.full_name, set()).add(info.pid)  # another command may have added some
        for program in self._programs:
            if (deaths := len(self._pids[program.full_name] - {0}) - 1) >= DEATHS_BEFORE_GIVING_UP:
                raise _keeps_dying(self._run_dir, program, deaths)
        ready, self._reason = http_ready(self._config.gateway.host, self._config.gateway.port)
        return ready


def check_programs(run_dir: Path, programs: list[Program]) -> None:
    """Raises StackError, with the program's last log lines, if one cannot boot or keeps dying."""
    for program in programs:
        history = read_history(crash_file(run_dir, program.name))
        if history.boot_error:
            raise StackError(f"{program.name} cannot boot: {history.boot_error}")
        if (deaths := len(history.young_deaths)) >= DEATHS_BEFORE_GIVING_UP:
            raise _keeps_dying(run_dir, program, deaths)


def _keeps_dying(run_dir: Path, program: Program, deaths: int) -> StackError:
    path = logs_dir(run_dir) / f"{program.name}.log"
    lines = "\n".join(f"    {line:.400}" for line in last_lines(path))
    return StackError(f"{program.name} died {deaths} times while starting; the end of {path}:\n{lines}")


def stop_supervisord(run_dir: Path, timeout_s: float, say: Say) -> bool:
    """Has supervisord stop everything in order, kills it if that takes too long. False if there was none.

    Raises StackError if another command's stop does not end in time.
    """
    try:
        with SupervisorClient(run_dir) as client:
            pid = client.pid()
            pidfd = os.pidfd_open(pid)
            client.shutdown()
    except SupervisorHangs as error:
        raise StackError(
            f"{error}; its pid is in {run_dir / 'supervisord.pid'}: kill -9 ends it, and with it everything it started"
        ) from None
    except SupervisorGone:
        return False
    except SupervisorRefused:  # another command is stopping it already
        os.close(take_lock(run_dir, timeout_s))
        return True
    try:
        if not select.select([pidfd], [], [], timeout_s)[0]:
            say(f"not stopped after {timeout_s:.0f} s; killing what is left")
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # the kernel kills its children
            select.select([pidfd], [], [], 5)
    finally:
        os.close(pidfd)
    return True


def stop_timeout_s(config: ServiceConfig) -> float:
    """The longest an ordered stop may take: supervisord stops group after group."""
    seconds = config.gateway.drain_timeout_ms / 1000 + 15
    return seconds + sum((m.scheduler.drain_timeout_ms / 1000 + 15) * m.replicas for m in config.models)


def url(config: ServiceConfig) -> str:
    host = reachable(config.gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
