"""Rows that were in flight when ranks died: each runs again alone until it is cleared or convicted.

Knows the order of their trials; strikes are kept by the quarantine, the verdict is the planner's.
"""

from collections import deque

from scheduler.request import Request, Run


class Suspects:
    """Held rows, one to a run, the oldest first."""

    def __init__(self) -> None:
        self._rows: deque[Run] = deque()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def hold_first(self, run: Run) -> None:
        """The run's rows, no longer in flight, go before all others held."""
        request, start, stop = run
        request.drop(run)
        self._rows.extendleft(Run(request, row, row + 1) for row in reversed(range(start, stop)))

    def hold_last(self, request: Request, rows: list[int]) -> None:
        """Rows of a request that has just come, known from an earlier one."""
        self._rows.extend(Run(request, row, row + 1) for row in rows)

    def next(self, now: float, expired: list[Request]) -> Run | None:
        """The first row that somebody still waits for; those whose deadline has passed go to `expired`."""
        while self._rows:
            run = self._rows.popleft()
            if run.request.failure is not None:
                continue
            if run.request.deadline > now:
                return run
            run.request.fail("expired", "the deadline passed while the request waited to run again")
            expired.append(run.request)
        return None
