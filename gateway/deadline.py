"""A request's time, from its begin to its answer."""

import asyncio
from types import TracebackType
from typing import Self

from gateway.errors import DeadlineExceeded


class Deadline:
    """`with` it around what the current task does for a request: it is cancelled when `time_ms` are over.

    As asyncio.timeout, whose coroutines and states would cost more than all the checks of a small request.
    Raises DeadlineExceeded. `at` is on the loop's clock.
    """

    __slots__ = ("_num_cancels", "_passed", "_task", "_time_ms", "_timer", "at")

    def __init__(self, time_ms: int) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None, "deadlines are for tasks"
        self.at = loop.time() + time_ms / 1000
        self._time_ms = time_ms
        self._task = task
        self._num_cancels = task.cancelling()
        self._passed = False
        self._timer = loop.call_at(self.at, self._pass)

    def _pass(self) -> None:
        self._passed = True
        self._task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._passed and self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            text = f"no answer within {self._time_ms} ms; allow more with X-Timeout-Ms"
            raise DeadlineExceeded(text) from None
