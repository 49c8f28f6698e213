"""The sharing of one step between the two classes of work: interactive goes first, bulk keeps a share.

First come, first served within a class. Bulk owns `share` of every step while it waits, kept as a credit (deficit
round robin), so that rows of any size in either class get their turn within 1 / share steps. Should bulk have been
passed over for longer than its wait all the same, one step is its own: what has waited never becomes a wall before
interactive work. Knows nothing of what a row is; time is an argument.
"""

from dataclasses import dataclass
from typing import Protocol

from ipc.types import Priority


@dataclass(slots=True)
class Room:
    """What one step may still take. `num_tokens` is a hard bound (the slot's arrays), `cost` yields to a first row."""

    num_seqs: int
    num_tokens: int
    cost: float


class Filling(Protocol):
    """One step while it is being filled."""

    @property
    def room(self) -> Room:
        """What is left; `take` makes it less."""

    def bulk_since(self) -> float | None:
        """When the bulk request that is first in line arrived; None while no bulk work waits."""

    def take(self, priority: Priority, max_seqs: int, max_cost: float) -> float:
        """Takes rows of one class in order until the next does not fit; returns their cost."""


class Sharing:
    """Its state is the credit of bulk work, in units of cost, and when bulk had its last."""

    def __init__(self, share: float, wait_ms: int) -> None:
        self.share = share
        self.wait_s = wait_ms / 1000
        self._credit = 0.0
        self._served_at = float("-inf")

    def fill(self, filling: Filling, now: float) -> None:
        room, since = filling.room, filling.bulk_since()
        if since is None:
            self._credit = 0.0
            filling.take("interactive", room.num_seqs, room.cost)
            return
        budget = room.cost
        self._credit = min(self._credit + self.share * budget, budget)
        passed_over = now - max(self._served_at, since) >= self.wait_s
        due = passed_over or self._credit >= budget  # this step is its own
        kept = max(int(room.num_seqs * self.share), 1) if self.share and (room.num_seqs > 1 or due) else 0
        if not due:
            filling.take("interactive", room.num_seqs - kept, budget - self._credit)
        taken = filling.take("bulk", room.num_seqs, room.cost)
        if taken:
            self._served_at = now
        self._credit = max(0.0, self._credit - taken)
        filling.take("interactive", room.num_seqs, room.cost)
