"""The bounded pool of live requests, and the two queues (interactive, bulk) of those with rows to run.

Bounds are in requests and in tokens, and count a request from its arrival to its terminal message. Knows nothing of
steps, budgets or models.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from ipc.submit import Submit
from ipc.types import Priority


class Pooled(Protocol):
    """What the pool must know of a request."""

    @property
    def submit(self) -> Submit: ...

    @property
    def deadline(self) -> float: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def has_todo(self) -> bool:
        """Whether some row of it waits to run."""


R = TypeVar("R", bound=Pooled)


class Pool(Generic[R]):
    """First come, first served within a class. Times are seconds on the monotonic clock."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self.num_tokens_of: dict[Priority, int] = {"interactive": 0, "bulk": 0}
        self._live: dict[int, dict[int, R]] = {}  # gateway → chunk → request
        self._queues: dict[Priority, OrderedDict[int, R]] = {"interactive": OrderedDict(), "bulk": OrderedDict()}

    def find(self, gateway: int, chunk_id: int) -> R | None:
        return self._live.get(gateway, {}).get(chunk_id)

    def of_gateway(self, gateway: int) -> list[R]:
        return list(self._live.get(gateway, {}).values())

    def __iter__(self) -> Iterator[R]:
        """Every live request. The pool must not change meanwhile."""
        return (request for chunks in self._live.values() for request in chunks.values())

    def has_room(self, num_tokens: int) -> bool:
        return self.num_requests < self.max_requests and self.num_tokens + num_tokens <= self.max_tokens

    @property
    def has_waiting(self) -> bool:
        """Whether some request has rows to run."""
        return any(self._queues.values())

    def num_tokens_before(self, priority: Priority) -> int:
        """Tokens that are computed before a request of that class that comes now, some of which are done already."""
        return self.num_tokens if priority == "bulk" else self.num_tokens_of["interactive"]

    def add(self, request: R) -> None:
        self._live.setdefault(request.submit.gateway, {})[request.submit.chunk_id] = request
        self.num_requests += 1
        self.num_tokens += request.num_tokens
        self.num_tokens_of[request.submit.priority] += request.num_tokens
        if request.has_todo:
            self._queue(request)[id(request)] = request

    def close(self, request: R) -> None:
        """Forgets a request: its terminal message has been taken."""
        chunks = self._live[request.submit.gateway]
        del chunks[request.submit.chunk_id]
        if not chunks:
            del self._live[request.submit.gateway]
        self.num_requests -= 1
        self.num_tokens -= request.num_tokens
        self.num_tokens_of[request.submit.priority] -= request.num_tokens
        self.dequeue(request)

    def dequeue(self, request: R) -> None:
        """Takes it out of its queue, if it is there: it has no row to run."""
        self._queue(request).pop(id(request), None)

    def put_front(self, request: R) -> None:
        """Rows of it must run again, before all others of its class."""
        queue = self._queue(request)
        queue[id(request)] = request
        queue.move_to_end(id(request), last=False)

    def first(self, priority: Priority) -> R | None:
        """The first request of a class, whatever its deadline."""
        return next(iter(self._queues[priority].values()), None)

    def head(self, priority: Priority, now: float, expired: list[R]) -> R | None:
        """The first request of a class. Those whose deadline has passed leave the queue into `expired`."""
        while (request := self.first(priority)) is not None:
            if request.deadline > now:
                return request
            self.dequeue(request)
            expired.append(request)
        return None

    def _queue(self, request: R) -> "OrderedDict[int, R]":
        return self._queues[request.submit.priority]
