"""Which process listens on a port, by the kernel's own tables; with SO_REUSEPORT a connection would not tell."""

import os
from pathlib import Path

_LISTEN = "0A"


def listens(pid: int, port: int) -> bool:
    """Whether process `pid` (ours) has a TCP socket listening on `port`."""
    inodes = _listening_inodes(port)
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir()) if inodes else []
    except OSError:  # it ended
        return False
    return any(_target(entry) in inodes for entry in entries)


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:  # closed while we looked
        return ""


def _listening_inodes(port: int) -> set[str]:
    """Sockets listening on `port`, as /proc/<pid>/fd names them."""
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # no IPv6
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found
