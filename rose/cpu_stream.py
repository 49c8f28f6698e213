"""What a CUDA stream is on a GPU: work is queued, starts in the order given, and the caller does not wait.

A step comes in parts that are independent of each other. They run side by side, and those of the next step begin as
soon as there is room: no barrier between steps, and none between the operators of a part that has one thread. A step
that is alone divides all cores among its parts; one that has company takes its share of them.

A part with several cores always runs on the same worker. Each calling thread has an OpenMP team of its own, and once
the teams together have more threads than there are cores, OpenMP puts waiting threads to sleep at every barrier: a
query of 16 tokens then takes twice as long.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rose.lazy_tensor import CpuLazyTensor, EventFds

Work = Callable[[], None]


class _Part(NamedTuple):
    work: Work
    cores: int
    worker: int  # the one that must run it; -1: any
    lazy: CpuLazyTensor


class CpuStream:
    """`num_threads` worker threads that share as many cores. One thread launches.

    `in_order`: every part gets all cores, so that it begins only when the one before it has ended.
    """

    def __init__(self, num_threads: int, *, in_order: bool = False) -> None:
        self._event_fds = EventFds()
        self._queue: deque[_Part] = deque()
        self._changed = threading.Condition()
        self._num_threads = num_threads
        self._in_order = in_order
        self._free_cores = num_threads
        self._num_running = 0
        self._closed = False
        self._workers = [
            threading.Thread(target=self._run, args=(index,), name=f"forward-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for worker in self._workers:
            worker.start()

    def launch(self, works: Sequence[Work]) -> CpuLazyTensor:
        """Queues a step's parts and returns at once. A step without parts is done when its turn comes."""
        works = works or (_nothing,)
        lazy = CpuLazyTensor(self._event_fds, len(works))
        with self._changed:
            num_parts = len(works) + len(self._queue) + self._num_running
            cores = self._num_threads if self._in_order else max(1, self._num_threads // num_parts)
            self._queue.extend(_Part(work, cores, index if cores > 1 else -1, lazy) for index, work in enumerate(works))
            self._changed.notify_all()
        return lazy

    def drain(self) -> None:
        """Waits until nothing is queued or running."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._num_running)

    def close(self) -> None:
        """Ends the threads once the queue is empty; LazyTensors not yet asked are void."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()
        self._event_fds.close()

    def _run(self, worker: int) -> None:
        num_threads = 0  # torch keeps it per calling thread, but tells only what was last set by any
        while (part := self._take(worker)) is not None:
            error: BaseException | None = None
            try:
                if num_threads != part.cores:
                    torch.set_num_threads(part.cores)
                    num_threads = part.cores
                with torch.inference_mode():
                    part.work()
            except BaseException as caught:  # noqa: BLE001 - raised again by LazyTensor.ready, on the loop's thread
                error = caught
            part.lazy.part_done(error)
            self._give_back(part.cores)

    def _take(self, worker: int) -> _Part | None:
        """The next part, as soon as its cores are free; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_go_on(worker))
            if not self._queue:
                return None
            part = self._queue.popleft()
            self._free_cores -= part.cores
            self._num_running += 1
            self._changed.notify_all()  # the new head may be another worker's
            return part

    def _may_go_on(self, worker: int) -> bool:
        if not self._queue:
            return self._closed
        head = self._queue[0]
        return head.cores <= self._free_cores and head.worker in (-1, worker)

    def _give_back(self, cores: int) -> None:
        with self._changed:
            self._free_cores += cores
            self._num_running -= 1
            self._changed.notify_all()


def _nothing() -> None:
    pass
