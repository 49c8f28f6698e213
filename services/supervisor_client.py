"""Asks a running supervisord over its Unix socket. Knows programs and groups, not what they do."""

import http.client
import socket
import time
import xmlrpc.client
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from msgspec import Struct
from supervisor.xmlrpc import Faults, SupervisorTransport, UnixStreamHTTPConnection

STOPPING_POLL_S = 0.05
TIMEOUT_S = 10.0  # of one call; none of them waits for a program


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


class SupervisorGone(RuntimeError):
    """Nobody answers on the socket."""


class SupervisorHangs(SupervisorGone):
    """It is there, and does not answer in time."""


class SupervisorRefused(RuntimeError):
    """supervisord will not do it; the text is its own."""


class _Connection(UnixStreamHTTPConnection):  # type: ignore[misc]
    """supervisor's own knows no time limit."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self.socketfile)


class _Transport(SupervisorTransport):  # type: ignore[misc]
    def __init__(self, path: Path) -> None:
        super().__init__(None, None, f"unix://{path}")
        self._path = path
        self._get_connection = self._connect

    def _connect(self) -> _Connection:
        connection = _Connection("localhost")
        connection.socketfile = str(self._path)
        return connection


class SupervisorClient:
    """Every call raises SupervisorGone or SupervisorRefused."""

    def __init__(self, run_dir: Path) -> None:
        self._transport = _Transport(run_dir / "supervisor.sock")
        self._rpc = xmlrpc.client.ServerProxy("http://localhost", transport=self._transport)

    def __enter__(self) -> "SupervisorClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def pid(self) -> int:
        return cast(int, self._call("getPID"))

    def processes(self) -> list[ProcessInfo]:
        names = ProcessInfo.__struct_fields__
        return [ProcessInfo(**{name: info[name] for name in names}) for info in self._call("getAllProcessInfo")]

    def shutdown(self) -> None:
        """Asks it to stop everything, gateways first, and itself."""
        self._call("shutdown")

    def start(self, full_name: str) -> None:
        """Starts a program without waiting until it has run for startsecs."""
        self._await_end(full_name)
        self._call("startProcess", full_name, False, fine=Faults.ALREADY_STARTED)

    def stop(self, full_name: str) -> None:
        """Stops a program and waits for its end."""
        self._call("stopProcess", full_name, False, fine=Faults.NOT_RUNNING)
        self._await_end(full_name)

    def kill(self, full_name: str) -> None:
        """Ends a program at once; supervisord starts it anew."""
        self._call("signalProcess", full_name, "KILL", fine=Faults.NOT_RUNNING)

    def add_group(self, group: str) -> None:
        """Starts a group whose file has just been written."""
        self._call("reloadConfig")
        self._call("addProcessGroup", group, fine=Faults.ALREADY_ADDED)

    def remove_group(self, group: str) -> None:
        """Forgets a group; its programs must have been stopped."""
        self._call("removeProcessGroup", group, fine=Faults.BAD_NAME)
        self._call("reloadConfig")

    def _await_end(self, full_name: str) -> None:
        """Until a program is not on its way out: then it counts as not running, and a start is lost in silence."""
        while any(info.full_name == full_name and info.statename == "STOPPING" for info in self.processes()):
            time.sleep(STOPPING_POLL_S)

    def _call(self, method: str, *arguments: Any, fine: int | None = None) -> Any:
        """`fine`: the fault that says that nothing had to be done."""
        try:
            return getattr(self._rpc.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == fine:
                return None
            what = " ".join([method, *map(str, arguments)])
            raise SupervisorRefused(f"supervisord refuses {what}: {fault.faultString}") from None
        except TimeoutError as error:
            self._transport.close()  # its answer may still come
            raise SupervisorHangs(f"supervisord has not answered within {TIMEOUT_S:g} s") from error
        except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            raise SupervisorGone(f"supervisord does not answer ({error})") from error
        except KeyboardInterrupt:
            self._transport.close()  # half an answer is under way: the next call needs a connection of its own
            raise
