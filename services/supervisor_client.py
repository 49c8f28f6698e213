"""Asks a running supervisord over its Unix socket. Knows programs and groups, not what they do."""

import http.client
import xmlrpc.client
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from msgspec import Struct
from supervisor.xmlrpc import Faults, SupervisorTransport

GONE = (OSError, http.client.HTTPException)  # nobody answers


class ProcessInfo(Struct, frozen=True):
    """One program as supervisord sees it. Times are seconds since the epoch; 0: never."""

    group: str
    name: str
    statename: str  # STARTING | RUNNING | BACKOFF | STOPPING | STOPPED | EXITED | FATAL
    pid: int  # 0: none
    start: int
    now: int
    exitstatus: int

    @property
    def full_name(self) -> str:
        return f"{self.group}:{self.name}"

    @property
    def uptime_s(self) -> int:
        return max(0, self.now - self.start) if self.pid else 0


class SupervisorClient:
    """Every call raises OSError or HTTPException when supervisord is gone."""

    def __init__(self, run_dir: Path) -> None:
        self._transport = SupervisorTransport(None, None, f"unix://{run_dir / 'supervisor.sock'}")
        proxy = xmlrpc.client.ServerProxy("http://localhost", transport=self._transport)
        self._rpc: Any = proxy.supervisor

    def __enter__(self) -> "SupervisorClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def pid(self) -> int:
        return cast(int, self._rpc.getPID())

    def processes(self) -> list[ProcessInfo]:
        names = ProcessInfo.__struct_fields__
        return [ProcessInfo(**{name: info[name] for name in names}) for info in self._rpc.getAllProcessInfo()]

    def shutdown(self) -> None:
        """Asks it to stop everything, gateways first, and itself."""
        self._rpc.shutdown()

    def start(self, full_name: str) -> None:
        """Starts a program without waiting until it has run for startsecs."""
        self._ignoring(Faults.ALREADY_STARTED, self._rpc.startProcess, full_name, False)

    def stop(self, full_name: str) -> None:
        """Stops a program and waits for its end."""
        self._ignoring(Faults.NOT_RUNNING, self._rpc.stopProcess, full_name, True)

    def add_group(self, group: str) -> None:
        """Starts a group whose file has just been written."""
        self._rpc.reloadConfig()
        self._ignoring(Faults.ALREADY_ADDED, self._rpc.addProcessGroup, group)

    def remove_group(self, group: str) -> None:
        """Forgets a group; its programs must have been stopped."""
        self._ignoring(Faults.BAD_NAME, self._rpc.removeProcessGroup, group)
        self._rpc.reloadConfig()

    @staticmethod
    def _ignoring(code: int, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != code:
                raise
