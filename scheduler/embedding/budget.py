"""Which rows go into the next step: the room of one step, and the sharing of it between the two classes.

First come, first served within a class. Interactive goes first; bulk owns `share` of every step while it waits, kept
as a credit (deficit round robin), so that rows of any size in either class get their turn within 1 / share steps.
Should bulk have been passed over for longer than its wait all the same, one step is its own: what has waited never
becomes a wall before interactive work.
Cost is counted in tokens plus the quadratic part of attention.
"""

from bisect import bisect_right
from dataclasses import dataclass

from ipc.types import Priority
from scheduler.pool import Pool
from scheduler.request import Request, Run


@dataclass(slots=True)
class Room:
    """What one step may still take. `num_tokens` is a hard bound (the slot's arrays), `cost` yields to a first row."""

    num_seqs: int
    num_tokens: int
    cost: float

    def fits(self, request: Request, max_seqs: int, max_cost: float, force: bool) -> int:
        """Up to which row the first range of `request.todo` fits; the range's start where nothing does.

        `force` lets one row in whose cost is over the budget: alone it must always be plannable.
        """
        start, end = request.todo[0]
        cu_seqlens, cu_cost = request.cu_seqlens, request.cu_cost
        if min(max_seqs, self.num_seqs) < 1 or cu_seqlens[start + 1] - cu_seqlens[start] > self.num_tokens:
            return start
        end = min(end, start + min(max_seqs, self.num_seqs))
        stop = min(
            bisect_right(cu_seqlens, cu_seqlens[start] + self.num_tokens, start, end + 1) - 1,
            bisect_right(cu_cost, cu_cost[start] + min(max_cost, self.cost), start, end + 1) - 1,
        )
        return max(stop, start + 1) if force else max(stop, start)

    def spend(self, run: Run) -> float:
        """Returns the run's cost."""
        request, start, stop = run
        cost = request.cu_cost[stop] - request.cu_cost[start]
        self.num_seqs -= stop - start
        self.num_tokens -= request.cu_seqlens[stop] - request.cu_seqlens[start]
        self.cost -= cost
        return cost


class Sharing:
    """Fills steps from a pool. Its state is the credit of bulk work, in units of cost, and when bulk had its last."""

    def __init__(self, share: float, wait_ms: int) -> None:
        self.share = share
        self.wait_s = wait_ms / 1000
        self._credit = 0.0
        self._served_at = float("-inf")

    def fill(self, pool: Pool, room: Room, step: int, now: float, expired: list[Request]) -> list[Run]:
        """The runs of `step`; requests found expired on the way are appended to `expired`."""
        filling = _Filling(pool, room, step, now, expired)
        first = pool.head("bulk", now, expired)
        if first is None:
            self._credit = 0.0
            filling.take("interactive", room.num_seqs, room.cost)
            return filling.runs
        budget = room.cost
        self._credit = min(self._credit + self.share * budget, budget)
        passed_over = now - max(self._served_at, first.arrival) >= self.wait_s
        due = passed_over or self._credit >= budget  # this step is its own
        kept = max(int(room.num_seqs * self.share), 1) if self.share and (room.num_seqs > 1 or due) else 0
        if not due:
            filling.take("interactive", room.num_seqs - kept, budget - self._credit)
        taken = filling.take("bulk", room.num_seqs, room.cost)
        if taken:
            self._served_at = now
        self._credit = max(0.0, self._credit - taken)
        filling.take("interactive", room.num_seqs, room.cost)
        return filling.runs


class _Filling:
    """One step while it is being filled."""

    def __init__(self, pool: Pool, room: Room, step: int, now: float, expired: list[Request]) -> None:
        self.pool, self.room, self.step, self.now, self.expired = pool, room, step, now, expired
        self.runs: list[Run] = []

    def take(self, priority: Priority, max_seqs: int, max_cost: float) -> float:
        """Takes rows of one class in order until the next does not fit; returns their cost."""
        taken = 0.0
        while (request := self.pool.head(priority, self.now, self.expired)) is not None:
            stop = self.room.fits(request, max_seqs, max_cost - taken, force=not self.runs)
            if stop == request.todo[0][0]:
                break
            run = request.take(stop, self.step, self.now)
            self.runs.append(run)
            taken += self.room.spend(run)
            max_seqs -= run.stop - run.start
            if not request.todo:
                self.pool.dequeue(request)
        return taken
