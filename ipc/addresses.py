"""Every path and endpoint, from (run_dir, replica, rank). The one place where a name of a file is made up."""

from pathlib import Path
from urllib.parse import quote

MAX_SOCKET_PATH_BYTES = 107  # sizeof(sockaddr_un.sun_path) less the final zero


class AddressError(ValueError):
    """A path that cannot be a Unix socket; the text says what to shorten."""


def replica_id(model: str, index: int) -> str:
    """The name of a replica: `all-minilm-l6-v2/0`."""
    return f"{model}/{index}"


def replica_dir(run_dir: Path, replica: str) -> Path:
    """Where a replica's sockets lie; `replica` is a replica_id."""
    return run_dir / "replicas" / _file_name(replica)


def gateway_endpoint(run_dir: Path, replica: str) -> str:
    """ROUTER of the scheduler, for gateways on this host."""
    return _ipc(replica_dir(run_dir, replica) / "gateways.sock")


def rank_endpoint(run_dir: Path, replica: str) -> str:
    """ROUTER of the scheduler, for its ranks: step headers."""
    return _ipc(replica_dir(run_dir, replica) / "ranks.sock")


def membership_path(run_dir: Path, replica: str) -> Path:
    """Unix socket of the scheduler, for its ranks: Hello, Join and the ring's memfd."""
    return _checked(replica_dir(run_dir, replica) / "join.sock")


def replicas_file(run_dir: Path) -> Path:
    """What gateways watch to know the replicas."""
    return run_dir / "replicas.json"


def config_file(run_dir: Path) -> Path:
    """The configuration with every model's directory resolved; what the processes read."""
    return run_dir / "config.json"


def crash_file(run_dir: Path, program: str) -> Path:
    """Times at which a program started, for its crash-loop guard."""
    return run_dir / "starts" / f"{_file_name(program)}.json"


def shapes_file(run_dir: Path, model: str) -> Path:
    """Shapes of a model's steps that had graphs, for its ranks' next start."""
    return run_dir / "shapes" / f"{_file_name(model)}.json"


def _file_name(name: str) -> str:
    """`name` as one path component. Different names give different files: `a/b` is `a@b`, `a@b` is `a=40b`."""
    escaped = quote(name, safe="").replace("%2F", "@").replace("%", "=")
    return "=2E" + escaped[1:] if escaped.startswith(".") else escaped  # neither `..` nor a hidden file


def _ipc(path: Path) -> str:
    return f"ipc://{_checked(path)}"


def _checked(path: Path) -> Path:
    length = len(bytes(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise AddressError(
            f"socket path is {length} bytes, the system allows {MAX_SOCKET_PATH_BYTES}: {path} "
            "(choose a shorter run_dir or model name)"
        )
    return path
