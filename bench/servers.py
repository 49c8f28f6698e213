"""Servers that a comparison is made between: started, waited for, stopped; they outlive the command that starts them.

    python -m bench.servers start ours vllm --state DIR --models DIR --peer-site DIR
    python -m bench.servers wait --state DIR
    python -m bench.servers stop --state DIR

A server is a process group of its own and a line in DIR/<name>.json; only such groups are ever signalled.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

ROOT = Path(__file__).parent.parent
STOP_S = 40.0
POLL_S = 0.05


class ServerFailed(RuntimeError):
    """A server ended or did not become ready; the text ends with what it said last."""


class ServerSpec(Struct, frozen=True):
    """How to start one server, and where it says that it serves."""

    name: str
    command: list[str]
    port: int
    ready_path: str
    environment: dict[str, str] = {}
    without: tuple[str, ...] = ()  # variables it must not inherit
    settings: str = ""  # for the result file
    stops_its_own: bool = False  # its first process ends the others, in order


class Server(Struct):
    """One that was started."""

    name: str
    pid: int  # and process group
    port: int
    ready_path: str
    log: str
    started: float  # seconds since the epoch
    settings: str = ""
    stops_its_own: bool = False
    ready_s: float | None = None  # from its start to the first answer 200; an upper bound if nobody was looking

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def start(spec: ServerSpec, state: Path) -> Server:
    """Starts a server in a session of its own. Raises ServerFailed if one of that name lives."""
    state.mkdir(parents=True, exist_ok=True)
    if (known := read(state, spec.name)) is not None and alive(known):
        raise ServerFailed(f"{spec.name} is running already: stop it first")
    log = state / f"{spec.name}.log"
    environment = {name: value for name, value in os.environ.items() if name not in spec.without}
    with log.open("wb") as output:
        process = subprocess.Popen(
            spec.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=environment | spec.environment,
            start_new_session=True,
        )
    server = Server(
        name=spec.name,
        pid=process.pid,
        port=spec.port,
        ready_path=spec.ready_path,
        log=str(log),
        started=time.time(),
        settings=spec.settings,
        stops_its_own=spec.stops_its_own,
    )
    write(state, server)
    return server


def wait_ready(servers: Sequence[Server], state: Path, timeout_s: float) -> None:
    """Until all of them serve. Raises ServerFailed as soon as one ends, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    waiting = [server for server in servers if server.ready_s is None]
    while waiting:
        for server in list(waiting):
            if answers(server):
                server.ready_s = round(time.time() - server.started, 2)
                write(state, server)
                waiting.remove(server)
            elif not alive(server):
                raise ServerFailed(f"{server.name} ended before it served:\n{log_end(server)}")
        if waiting and time.monotonic() > deadline:
            names = ", ".join(server.name for server in waiting)
            raise ServerFailed(f"not ready within {timeout_s:.0f} s: {names}\n{log_end(waiting[0])}")
        time.sleep(POLL_S)


def stop(server: Server, state: Path) -> None:
    """Asks its process group to end, then makes it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not alive(server):
            break
        send = os.kill if server.stops_its_own and number == signal.SIGTERM else os.killpg
        send(server.pid, number)
        deadline = time.monotonic() + STOP_S
        while alive(server) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    with suppress(ProcessLookupError):  # what it left in its group
        os.killpg(server.pid, signal.SIGKILL)
    (state / f"{server.name}.json").unlink(missing_ok=True)


@contextmanager
def running(specs: Sequence[ServerSpec], state: Path, timeout_s: float) -> Iterator[list[Server]]:
    """Servers for the length of a block."""
    servers: list[Server] = []
    try:
        servers += (start(spec, state) for spec in specs)
        wait_ready(servers, state, timeout_s)
        yield servers
    finally:
        for server in reversed(servers):
            stop(server, state)


def alive(server: Server) -> bool:
    """Whether its first process runs; one of ours that has ended is reaped."""
    try:
        if os.waitpid(server.pid, os.WNOHANG)[0]:
            return False
    except ChildProcessError:
        pass  # another command's child
    try:
        text = Path(f"/proc/{server.pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def answers(server: Server) -> bool:
    try:
        with urllib.request.urlopen(server.url + server.ready_path, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def log_end(server: Server, max_bytes: int = 3000) -> str:
    return Path(server.log).read_bytes()[-max_bytes:].decode(errors="replace")


def read(state: Path, name: str) -> Server | None:
    try:
        return msgspec.json.decode((state / f"{name}.json").read_bytes(), type=Server)
    except FileNotFoundError:
        return None


def read_all(state: Path) -> list[Server]:
    return [msgspec.json.decode(path.read_bytes(), type=Server) for path in sorted(state.glob("*.json"))]


def write(state: Path, server: Server) -> None:
    (state / f"{server.name}.json").write_bytes(msgspec.json.encode(server))


def main() -> None:
    from bench.peers import HttpSetup, make_http_peer

    parser = argparse.ArgumentParser(prog="python -m bench.servers", description=__doc__)
    parser.add_argument("action", choices=["start", "wait", "stop"])
    parser.add_argument(
        "peers", nargs="*", help="start: of bench.peers, those alive are left; wait, stop: servers, default all"
    )
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="the directory that bench.random_model wrote")
    parser.add_argument("--peer-site", type=Path, help="where the peer's packages are, if not installed")
    parser.add_argument("--device", default="auto", help="of our ranks")
    parser.add_argument("--timeout", type=float, default=300.0)
    args = parser.parse_args()
    try:
        if args.action == "start":
            setup = HttpSetup(args.models, args.state, args.peer_site, args.device)
            for name in args.peers:
                for spec in make_http_peer(name).servers(setup):
                    known = read(args.state, spec.name)
                    if known is not None and alive(known):
                        continue
                    print(f"{spec.name}: process {start(spec, args.state).pid}", flush=True)
            return
        chosen = [server for server in read_all(args.state) if not args.peers or server.name in args.peers]
        if args.action == "wait":
            wait_ready(chosen, args.state, args.timeout)
            print(", ".join(f"{server.name} after {server.ready_s} s" for server in chosen))
            return
        for server in chosen:
            stop(server, args.state)
    except ServerFailed as error:
        sys.exit(f"bench: {error}")


if __name__ == "__main__":
    main()
