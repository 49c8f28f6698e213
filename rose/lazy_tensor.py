"""A step's result on its way to the slot: a flag that turns once, and on CPU a descriptor to sleep on.

What computes the result is elsewhere: threads (rose.cpu_stream) or a CUDA stream.
"""

import os
import threading
import traceback
from collections.abc import Callable

import torch

from rose.runner import OutOfMemory

_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


class EventFds:
    """Descriptors that steps signal, used again and again so that none is opened per step."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._all: list[int] = []

    def take(self) -> int:
        if not self._free:
            self._all.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            self._free.append(self._all[-1])
        return self._free.pop()

    def give_back(self, fd: int) -> None:
        os.eventfd_read(fd)
        self._free.append(fd)

    def close(self) -> None:
        for fd in self._all:
            os.close(fd)
        self._all, self._free = [], []


class CpuLazyTensor:
    """Turns ready when each of `num_parts` has called `part_done`. One thread asks, any thread answers."""

    def __init__(self, event_fds: EventFds, num_parts: int) -> None:
        self._event_fds = event_fds
        self._fd = event_fds.take()
        self._lock = threading.Lock()
        self._parts_left = num_parts
        self._error: BaseException | None = None
        self._ready = False

    def part_done(self, error: BaseException | None = None) -> None:
        """A part has written its outputs, or failed. The last one wakes whoever sleeps on `fileno`."""
        with self._lock:
            self._error = self._error or error
            self._parts_left -= 1
            if self._parts_left == 0:
                os.eventfd_write(self._fd, 1)  # under the lock: `ready` may read it at once

    def ready(self) -> bool:
        if not self._ready:
            with self._lock:
                if self._parts_left:
                    return False
            self._ready = True
            self._event_fds.give_back(self._fd)
            self._fd = -1
        if self._error is not None:
            raise as_step_error(self._error)
        return True

    def fileno(self) -> int:
        return self._fd


class CudaLazyTensor:
    """Ready when the event behind the step's copies has passed. Only polling tells.

    `landed` is called then, once: what the host still has to do before the outputs are in the slot.
    """

    def __init__(self, event: torch.cuda.Event, landed: Callable[[], None] | None = None) -> None:
        self._event = event
        self._landed = landed

    def ready(self) -> bool:
        if not self._event.query():
            return False
        landed, self._landed = self._landed, None
        if landed is not None:
            landed()
        return True

    def fileno(self) -> int:
        return -1


def as_step_error(error: BaseException) -> BaseException:
    """OutOfMemory for what a smaller step may cure, else the error itself."""
    text = str(error).lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in _NO_MEMORY):
        traceback.clear_frames(error.__traceback__)  # they hold what the step had made, as long as the error is kept
        return OutOfMemory(str(error))
    return error
