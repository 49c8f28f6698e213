"""One chunk as the scheduler knows it: the only class that changes a request's state.

A row is `todo`, held (a suspect, waiting to run alone), in flight or done. A request ends with exactly one terminal
message, and not before the last step that carries one of its rows is over.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc.submit import RejectCode, Rejected, Result, Submit
from ipc.types import Timings


class Run(NamedTuple):
    """Rows [start, stop) of one request."""

    request: "Request"
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Request:
    """`arrival` and `deadline` are seconds on the monotonic clock; `frame` is int32 [sum(lengths)], raw."""

    submit: Submit
    frame: bytes | memoryview
    arrival: float
    deadline: float
    attempt: int  # as the sender counted, plus one for each death it met here
    cu_seqlens: list[int] = field(default_factory=list)  # [num_rows + 1]
    cu_cost: list[float] = field(default_factory=list)  # [num_rows + 1], in tokens of a step's budget
    row_bytes: int = 0
    todo: deque[tuple[int, int]] = field(default_factory=deque)  # ranges of rows, in order
    num_in_flight: int = 0  # rows
    num_done: int = 0
    failure: Rejected | None = None
    closed: bool = False  # the terminal message has been taken
    first_step_at: float | None = None
    _last_step: int = 0
    _num_steps: int = 0
    _num_retries: int = 0
    _compute_ms: float = 0.0
    _output: bytes | bytearray = b""

    @classmethod
    def from_submit(cls, submit: Submit, frame: bytes | memoryview, now: float) -> "Request":
        """A request that has not been validated yet (a planner's `add` does)."""
        return cls(submit, frame, now, now + submit.timeout_ms / 1000, submit.attempt)

    @property
    def num_rows(self) -> int:
        return len(self.submit.lengths)

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def has_todo(self) -> bool:
        return bool(self.todo)

    @property
    def num_retries(self) -> int:
        return self._num_retries

    @property
    def only_waits(self) -> bool:
        """Whether no row of it is in flight or held."""
        return self.num_done + sum(stop - start for start, stop in self.todo) == self.num_rows

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """int32 [num_tokens], a view of the frame."""
        return np.frombuffer(self.frame, np.int32)

    def row_ids(self, row: int) -> NDArray[np.int32]:
        return self.input_ids[self.cu_seqlens[row] : self.cu_seqlens[row + 1]]

    def open(self, cu_seqlens: list[int], cu_cost: list[float], row_bytes: int) -> None:
        """Makes every row `todo`; the planner has found it valid."""
        self.cu_seqlens, self.cu_cost, self.row_bytes = cu_seqlens, cu_cost, row_bytes
        self.todo.append((0, self.num_rows))

    def hold(self, rows: list[int]) -> None:
        """Before anything ran: these rows, in order, are held and not `todo`."""
        start, stop = self.todo.pop()
        for row in rows:
            if start < row:
                self.todo.append((start, row))
            start = row + 1
        if start < stop:
            self.todo.append((start, stop))

    def take(self, stop: int, step: int, now: float) -> Run:
        """Puts the first rows of `todo`, up to `stop`, into `step`."""
        start, end = self.todo.popleft()
        if stop < end:
            self.todo.appendleft((stop, end))
        return self.launch(Run(self, start, stop), step, now)

    def launch(self, run: Run, step: int, now: float) -> Run:
        """`run`'s rows, taken from `todo` or held, are in flight from now on."""
        self.num_in_flight += run.stop - run.start
        if self.first_step_at is None:
            self.first_step_at = now
        if step != self._last_step:
            self._last_step = step
            self._num_steps += 1
        return run

    def complete(self, run: Run, rows: bytes, compute_ms: float) -> None:
        """`rows` are the run's results, `row_bytes` each."""
        num_rows = run.stop - run.start
        self.num_in_flight -= num_rows
        self.num_done += num_rows
        self._compute_ms += compute_ms
        if num_rows == self.num_rows:
            self._output = rows
            return
        if not self._output:
            self._output = bytearray(self.num_rows * self.row_bytes)
        assert isinstance(self._output, bytearray)
        self._output[run.start * self.row_bytes : run.stop * self.row_bytes] = rows

    def drop(self, run: Run) -> None:
        """The run's step is over without a result that anybody wants, or its rows are held from now on."""
        self.num_in_flight -= run.stop - run.start

    def put_back(self, run: Run) -> None:
        """The run's step is over without a result: its rows are the first of `todo` again."""
        self.drop(run)
        start, stop = run.start, run.stop
        if self.todo and self.todo[0][0] == stop:
            stop = self.todo.popleft()[1]
        self.todo.appendleft((start, stop))

    def count_retry(self) -> None:
        self._num_retries += 1

    def count_death(self) -> None:
        """A death while rows of this request were in flight, however many."""
        self.attempt += 1
        self._num_retries += 1

    def fail(self, code: RejectCode, message: str, index: int | None = None, retry_after_ms: int = 0) -> None:
        """No further step will contain it. The first failure stands."""
        self.todo.clear()
        if self.failure is None:
            self.failure = self.rejection(code, message, index, retry_after_ms)

    def rejection(self, code: RejectCode, message: str, index: int | None = None, retry_after_ms: int = 0) -> Rejected:
        return Rejected(
            gateway=self.submit.gateway,
            chunk_id=self.submit.chunk_id,
            code=code,
            message=message,
            index=index,
            retry_after_ms=retry_after_ms,
            attempt=self.attempt,
        )

    def terminal(self, now: float) -> tuple[Result | Rejected, memoryview | None] | None:
        """The terminal message and its frame, once, as soon as it is due; None before and after."""
        if self.closed or self.num_in_flight or (self.failure is None and self.num_done < self.num_rows):
            return None
        self.closed = True
        payload, self.frame, self._output = memoryview(self._output), b"", b""
        if self.failure is not None:
            return self.failure, None
        timings = Timings(
            queue_ms=((self.first_step_at or now) - self.arrival) * 1000,
            compute_ms=self._compute_ms,
            num_steps=self._num_steps,
            num_retries=self._num_retries,
        )
        submit = self.submit
        return Result(submit.gateway, submit.chunk_id, self.num_rows, self.row_bytes, timings), payload
