"""Which rows go into the next step of an encoder: as many as its room takes, by the sharing of scheduler.sharing.

Cost is counted in tokens plus the quadratic part of attention.
"""

from bisect import bisect_right

from ipc.types import Priority
from scheduler.pool import Pool
from scheduler.request import Request, Run
from scheduler.sharing import Room


class StepFilling:
    """Implements scheduler.sharing.Filling: collects the `runs` of `step`, and requests found `expired` on the way."""

    def __init__(self, pool: Pool[Request], room: Room, step: int, now: float) -> None:
        self.room = room
        self.runs: list[Run] = []
        self.expired: list[Request] = []
        self._pool, self._step, self._now = pool, step, now

    def bulk_since(self) -> float | None:
        first = self._pool.head("bulk", self._now, self.expired)
        return None if first is None else first.arrival

    def take(self, priority: Priority, max_seqs: int, max_cost: float) -> float:
        taken = 0.0
        while (request := self._pool.head(priority, self._now, self.expired)) is not None:
            stop = self._fits(request, max_seqs, max_cost - taken)
            if stop == request.todo[0][0]:
                break
            run = request.take(stop, self._step, self._now)
            self.runs.append(run)
            taken += self._spend(run)
            max_seqs -= run.stop - run.start
            if not request.todo:
                self._pool.dequeue(request)
        return taken

    def _fits(self, request: Request, max_seqs: int, max_cost: float) -> int:
        """Up to which row the first range of `request.todo` fits; the range's start where nothing does.

        The cost of the step's first row may be over the budget: alone it must always be plannable.
        """
        room = self.room
        start, end = request.todo[0]
        cu_seqlens, cu_cost = request.cu_seqlens, request.cu_cost
        if min(max_seqs, room.num_seqs) < 1 or cu_seqlens[start + 1] - cu_seqlens[start] > room.num_tokens:
            return start
        end = min(end, start + min(max_seqs, room.num_seqs))
        stop = min(
            bisect_right(cu_seqlens, cu_seqlens[start] + room.num_tokens, start, end + 1) - 1,
            bisect_right(cu_cost, cu_cost[start] + min(max_cost, room.cost), start, end + 1) - 1,
        )
        return max(stop, start if self.runs else start + 1)

    def _spend(self, run: Run) -> float:
        """Returns the run's cost."""
        request, start, stop = run
        cost = request.cu_cost[stop] - request.cu_cost[start]
        self.room.num_seqs -= stop - start
        self.room.num_tokens -= request.cu_seqlens[stop] - request.cu_seqlens[start]
        self.room.cost -= cost
        return cost
