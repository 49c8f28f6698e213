"""One process at a time fetches a thing into the cache."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.source_names import SourceError


@contextmanager
def fetch_lock(cache_dir: Path, name: str) -> Iterator[None]:
    """Holds the lock under which `name` is fetched; waits for another process that has it.

    Raises SourceError for a cache that cannot be written.
    """
    directory = cache_dir / "locks"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / f"{name}.lock").open("w")
    except OSError as error:
        raise SourceError(f"cache_dir: {cache_dir} cannot be used: {error.strerror}; choose another") from None
    with lock as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
