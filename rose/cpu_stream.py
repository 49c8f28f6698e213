"""What a CUDA stream is on a GPU: work is queued, starts in the order given, and the caller does not wait.

A step comes in parts, independent of each other, each with the number of threads it may use. Parts of one step run
side by side, and those of the next begin as soon as there is room: there is no barrier between steps, and none between
the operators of a part that has one thread.
"""

import threading
from collections import deque
from collections.abc import Callable

import torch

from rose.lazy_tensor import CpuLazyTensor, EventFds

Part = tuple[Callable[[], None], int]  # the work, and its threads


class CpuStream:
    """`num_threads` worker threads that share as many cores."""

    def __init__(self, num_threads: int) -> None:
        self._event_fds = EventFds()
        self._queue: deque[tuple[Callable[[], None], int, CpuLazyTensor]] = deque()
        self._changed = threading.Condition()
        self._free_cores = num_threads
        self._num_threads = num_threads
        self._closed = False
        self._workers = [
            threading.Thread(target=self._work, name=f"forward-{index}", daemon=True) for index in range(num_threads)
        ]
        for worker in self._workers:
            worker.start()

    def launch(self, parts: list[Part]) -> CpuLazyTensor:
        """Queues a step's parts and returns at once. A step without parts is done when its turn comes."""
        parts = parts or [(_nothing, 1)]
        lazy = CpuLazyTensor(self._event_fds, len(parts))
        with self._changed:
            self._queue.extend((work, cores, lazy) for work, cores in parts)
            self._changed.notify_all()
        return lazy

    def drain(self) -> None:
        """Waits until nothing is queued or running."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and self._free_cores == self._num_threads)

    def close(self) -> None:
        """Ends the threads once the queue is empty; LazyTensors not yet asked are void."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()
        self._event_fds.close()

    def _work(self) -> None:
        num_threads = 0  # torch keeps it per calling thread, but tells only what was last set by any
        while (taken := self._take()) is not None:
            work, cores, lazy = taken
            error: BaseException | None = None
            try:
                if num_threads != cores:
                    torch.set_num_threads(cores)
                    num_threads = cores
                with torch.inference_mode():
                    work()
            except BaseException as caught:  # noqa: BLE001 - raised again by LazyTensor.ready, on the loop's thread
                error = caught
            lazy.part_done(error)
            with self._changed:
                self._free_cores += cores
                self._changed.notify_all()

    def _take(self) -> tuple[Callable[[], None], int, CpuLazyTensor] | None:
        """The next part, as soon as its cores are free; None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._queue and self._queue[0][1] <= self._free_cores) or (self._closed and not self._queue)
            )
            if not self._queue:
                return None
            taken = self._queue.popleft()
            self._free_cores -= taken[1]
            return taken


def _nothing() -> None:
    pass
