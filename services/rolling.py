"""Changes a running stack without dropping a request: rolling restart, and more or fewer replicas.

The order that makes it safe: gateways are told first (replicas.json), then the scheduler finishes what it has,
then its ranks stop. A replica that comes is told to gateways only once it has computed something.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ipc.addresses import crash_file, replica_dir, replicas_file
from services.config import ModelConfig, RunConfig
from services.config_checks import MAX_REPLICAS
from services.files import write_private
from services.health import is_ready, replica_status
from services.listening import listens
from services.log_tail import last_lines
from services.programs import Program, gateway_program, rank_program, replica_group, replica_programs, scheduler_program
from services.render import replica_config, replica_file
from services.replicas import ReplicaTable, read_replicas, write_replicas
from services.run_dir import StackError, is_claimed
from services.stack import Say, check_programs, logs_dir
from services.supervisor_client import SupervisorClient

GATEWAYS_SEE_S = 0.6  # gateways look at replicas.json every 250 ms
GATEWAY_START_S = 30.0
POLL_S = 0.1


class Rolling:
    """One such change at a time, on the stack in `run_dir`."""

    def __init__(self, run: RunConfig, client: SupervisorClient, say: Say) -> None:
        self._config = run.config
        self._run_dir = Path(run.config.run_dir)
        self._client = client
        self._say = say

    def restart_replica(self, model: ModelConfig, replica: str) -> None:
        """Other replicas take the work meanwhile; with none, requests wait in the gateways."""
        self._client.processes()  # raises SupervisorGone before anything is said or written
        table = read_replicas(self._run_dir)
        shared = table.num_active(model.name, apart_from=replica) > 0
        if shared:
            self._mark(table, model, replica, "draining")
        try:
            self._say(f"{replica}: stopping" if shared else f"{replica}: stopping (the only one: requests wait)")
            try:
                self._stop_replica(model, replica)
            finally:  # also on Ctrl-C: supervisord starts nothing again that it was told to stop
                self._start_replica(model, replica)
            self._wait_ready(model, replica)
        finally:
            table = read_replicas(self._run_dir)
            if replica in table.draining(model.name):
                self._mark(table, model, replica, "active")
        self._say(f"{replica}: ready")

    def restart_gateways(self) -> None:
        """One at a time; the others answer meanwhile."""
        for index in range(self._config.gateway.num_gateways):
            program = gateway_program(index)
            try:
                self._client.stop(program.full_name)
            finally:  # also on Ctrl-C
                self._client.start(program.full_name)
            self._wait(partial(self._gateway_listens, program), GATEWAY_START_S, [program])
            self._say(f"{program.name}: listening")

    def scale(self, model: ModelConfig, count: int) -> None:
        """Adds or removes replicas until there are `count`."""
        if not 1 <= count <= MAX_REPLICAS:
            raise StackError(f"{model.name}={count}: must be 1..{MAX_REPLICAS}")
        if count > 1 and model.scheduler.listen is not None:
            raise StackError(
                f"{model.name}={count}: scheduler.listen is one endpoint, for one replica; take it out first"
            )
        self._client.processes()  # raises SupervisorGone before anything is said or written
        for replica in read_replicas(self._run_dir).draining(model.name):  # left by a command that was interrupted
            self._remove(model, replica)
        replicas = read_replicas(self._run_dir).ids(model.name)
        for _ in range(count - len(replicas)):
            self._add(model)
        for replica in reversed(replicas[count:]):
            self._remove(model, replica)
        self._say(f"{model.name}: {count} replica{'s' if count > 1 else ''}")

    def _add(self, model: ModelConfig) -> None:
        replica = read_replicas(self._run_dir).free_id(model.name)
        self._say(f"{replica}: starting")
        text = replica_config(self._config, model, replica, self._run_dir)
        write_private(replica_file(self._run_dir, replica), text)
        try:
            self._client.add_group(replica_group(replica))
            self._start_replica(model, replica)  # a group that was there already may have been stopped
            self._wait_ready(model, replica)
        except BaseException:  # also Ctrl-C: half a replica must not stay
            self._forget(model, replica)
            raise
        table = read_replicas(self._run_dir)
        table.add(self._run_dir, model.name, replica)
        write_replicas(self._run_dir, table)
        self._say(f"{replica}: ready")

    def _remove(self, model: ModelConfig, replica: str) -> None:
        self._say(f"{replica}: draining")
        self._mark(read_replicas(self._run_dir), model, replica, "draining")
        self._forget(model, replica)
        table = read_replicas(self._run_dir)
        table.remove(model.name, replica)
        write_replicas(self._run_dir, table)
        self._say(f"{replica}: removed")

    def _forget(self, model: ModelConfig, replica: str) -> None:
        """Stops a replica and removes all of it but its logs."""
        self._stop_replica(model, replica)
        replica_file(self._run_dir, replica).unlink(missing_ok=True)
        self._client.remove_group(replica_group(replica))
        shutil.rmtree(replica_dir(self._run_dir, replica), ignore_errors=True)
        for program in replica_programs(replica, model.tensor_parallel_size):
            crash_file(self._run_dir, program.name).unlink(missing_ok=True)

    def _stop_replica(self, model: ModelConfig, replica: str) -> None:
        """The scheduler first: it finishes what it has, for which it needs its ranks."""
        for program in reversed(replica_programs(replica, model.tensor_parallel_size)):
            self._client.stop(program.full_name)

    def _start_replica(self, model: ModelConfig, replica: str) -> None:
        for rank in range(model.tensor_parallel_size):
            self._client.start(rank_program(replica, rank).full_name)
        self._client.start(scheduler_program(replica).full_name)

    def _mark(self, table: ReplicaTable, model: ModelConfig, replica: str, state: str) -> None:
        table.mark(model.name, replica, "draining" if state == "draining" else "active")
        write_replicas(self._run_dir, table)
        time.sleep(GATEWAYS_SEE_S)

    def _wait_ready(self, model: ModelConfig, replica: str) -> None:
        programs = replica_programs(replica, model.tensor_parallel_size)
        timeout_s = model.scheduler.load_deadline_ms / 1000 + 30
        self._wait(lambda: is_ready(replica_status(self._run_dir, replica)), timeout_s, programs)

    def _gateway_listens(self, program: Program) -> bool:
        info = next((info for info in self._client.processes() if info.full_name == program.full_name), None)
        return info is not None and listens(info.pid, self._config.gateway.port)

    def _wait(self, done: Callable[[], bool], timeout_s: float, programs: list[Program]) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            self._client.processes()  # wakes supervisord, which by itself looks around once a second
            check_programs(self._run_dir, programs)
            if time.monotonic() > deadline:
                path = logs_dir(self._run_dir) / f"{programs[0].name}.log"
                lines = "\n".join(f"    {line:.400}" for line in last_lines(path, 5))
                raise StackError(f"{programs[0].group} not ready after {timeout_s:.0f} s; the end of {path}:\n{lines}")
            time.sleep(POLL_S)


@contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Refuses two changes at once. Raises StackError."""
    if not (is_claimed(run_dir) and replicas_file(run_dir).is_file()):
        raise StackError(f"no stack runs in {run_dir} (`bouquet up` starts one)")
    fd = os.open(run_dir / "ops.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(
                "another bouquet restart or scale is at work on this stack; wait until it has finished"
            ) from None
        yield
    finally:
        os.close(fd)
