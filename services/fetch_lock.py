"""One process at a time fetches a thing into the cache."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def fetch_lock(cache_dir: Path, name: str) -> Iterator[None]:
    """Holds the lock under which `name` is fetched; waits for another process that has it."""
    directory = cache_dir / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
