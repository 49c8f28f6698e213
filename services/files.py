"""Files that nobody but their owner may read."""

import os
from pathlib import Path


def write_private(path: Path, content: str | bytes) -> None:
    """Writes a whole file, flushed to disk, that only this user can read from its first moment on."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
