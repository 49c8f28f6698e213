"""A way out for a rank that waits for another which may never come. Free of torch."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_SECONDS = 0.1


@contextmanager
def leaving_when(lost: Callable[[], bool], leave: Callable[[], None]) -> Iterator[None]:
    """Calls `leave`, on a thread of its own, as soon as `lost` says so while the block runs.

    A collective cannot be interrupted, so `leave` is the end of the process.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            if lost():
                leave()

    thread = threading.Thread(target=watch, name="group-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
