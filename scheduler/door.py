"""What every request must be to enter the pool, whatever its task; the task's own checks are the planner's.

The gateway has validated for the user's sake; here it is for the neighbours' sake.
"""

from collections.abc import Callable

from ipc.submit import Rejected
from scheduler.pool import Pool, R
from scheduler.request import Request

RETRY_AFTER_MS = 1_000


class Invalid(ValueError):
    """The request can never run. `index` is the sequence at fault, where one is."""

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


def find_refusal(request: Request, pool: Pool[R], admit: Callable[[Request], None], now: float) -> Rejected | None:
    """Why `request` cannot enter `pool`; None when it can. `admit` opens it, or raises Invalid."""
    submit = request.submit
    if request.deadline <= now:
        return request.rejection("expired", "the deadline had passed when the request arrived")
    if pool.find(submit.gateway, submit.chunk_id) is not None:
        return request.rejection("invalid", f"chunk_id {submit.chunk_id} is in use: choose another")
    try:
        admit(request)
    except Invalid as error:
        return request.rejection("invalid", str(error), error.index)
    if request.num_tokens > pool.max_tokens:
        return request.rejection(
            "invalid",
            f"the chunk has {request.num_tokens} tokens, the scheduler's pool holds {pool.max_tokens} "
            "(max_pending_tokens): split it",
        )
    if not pool.has_room(request.num_tokens):
        return request.rejection("full", "the scheduler's pool is full: come back later", None, RETRY_AFTER_MS)
    return None
