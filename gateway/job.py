"""The work of one request on its way: chunks, and the Job of those for vectors (generate_job.py has the other).

Knows neither sockets nor which replica would be best.
"""

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from gateway.errors import GatewayError, InternalError
from gateway.split import ChunkInput
from gateway.tasks import Rows
from ipc.submit import TokenDelta
from ipc.types import OutputSpec, Priority, SamplingParams, Timings

AbortReason = Literal["disconnect", "deadline", "stop"]


class Carrier(Protocol):
    """Where a chunk is in flight."""

    def abort(self, chunk: "Chunk", reason: AbortReason) -> None:
        """Forgets the chunk, and tells whoever works on it."""


class Work(Protocol):
    """What a chunk belongs to, and who hears what becomes of it. Each chunk ends once: answered in full, or failed."""

    def succeeded(self, chunk: "Chunk", payload: bytes, row_bytes: int, timings: Timings) -> None:
        """All rows of the chunk are here."""

    def tokens(self, chunk: "Chunk", delta: TokenDelta) -> None:
        """New tokens of the chunk; the last ones if the delta has a finish_reason."""

    def failed(self, error: GatewayError) -> None:
        """One of the chunks will not be answered, which ends the work."""

    def may_restart(self, chunk: "Chunk") -> bool:
        """Whether the chunk, lost on its way, is to be sent again from its start. If not, the work has failed."""


class Chunk:
    """One chunk. `attempt` counts the replicas it was sent to and lost with, and the requeues there, together."""

    __slots__ = (
        "attempt",
        "cache_salt",
        "cancelled",
        "carrier",
        "chunk_id",
        "deadline",
        "given_back",
        "input",
        "job",
        "priority",
        "refused",
        "sampling",
        "spec",
    )

    def __init__(
        self,
        job: Work,
        work: ChunkInput,
        priority: Priority,
        deadline: float,
        *,
        spec: OutputSpec = OutputSpec(),  # noqa: B008 - frozen
        sampling: SamplingParams | None = None,
        cache_salt: bytes = b"",
    ) -> None:
        self.job = job
        self.input = work
        self.spec = spec
        self.sampling = sampling  # of a generation
        self.cache_salt = cache_salt
        self.priority: Priority = priority
        self.deadline = deadline  # on the loop's clock
        self.attempt = 1
        self.chunk_id = 0  # a new one each time it is sent
        self.carrier: Carrier | None = None
        self.refused: set[str] = set()  # replicas whose pool was full
        self.given_back = False  # a replica had taken it, and lost its ranks
        self.cancelled = False

    def abort(self, reason: AbortReason, forget: Callable[["Chunk"], object]) -> None:
        """Ends the chunk wherever it is; `forget` is called if that is on no link. Harmless for one that has ended."""
        self.cancelled = True
        if self.carrier is None:
            forget(self)
        else:
            self.carrier.abort(self, reason)


class Job:
    """The chunks of one request: all of them answered, or an error and the rest aborted.

    `forget` is called for a chunk that is in flight nowhere when the job ends early.
    """

    def __init__(
        self,
        inputs: list[ChunkInput],
        spec: OutputSpec,
        priority: Priority,
        deadline: float,
        forget: Callable[[Chunk], object],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.future: asyncio.Future[Rows] = loop.create_future()
        self.chunks = [Chunk(self, work, priority, deadline, spec=spec) for work in inputs]
        self._forget = forget
        self._results: dict[int, tuple[bytes, Timings]] = {}  # by the chunk's first sequence

    def succeeded(self, chunk: Chunk, payload: bytes, row_bytes: int, timings: Timings) -> None:
        if len(self.chunks) == 1:
            if not self.future.done():
                self.future.set_result(Rows([payload], row_bytes, timings))
            return
        self._results[chunk.input.first] = (payload, timings)
        if len(self._results) == len(self.chunks) and not self.future.done():
            self.future.set_result(self._gather(row_bytes))

    def tokens(self, chunk: Chunk, delta: TokenDelta) -> None:
        self.failed(InternalError("a replica answered with tokens where vectors were asked for"))

    def may_restart(self, chunk: Chunk) -> bool:
        return True  # nothing of it has reached anybody

    def failed(self, error: GatewayError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.abort("stop")

    def abort(self, reason: AbortReason) -> None:
        """Ends what is still in flight or waiting."""
        for chunk in self.chunks:
            chunk.abort(reason, self._forget)
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # seen, should nobody wait for it any more

    def _gather(self, row_bytes: int) -> Rows:
        results = [self._results[chunk.input.first] for chunk in self.chunks]
        times = [timings for _, timings in results]
        timings = Timings(
            queue_ms=max(t.queue_ms for t in times),
            compute_ms=max(t.compute_ms for t in times),
            num_steps=sum(t.num_steps for t in times),
            num_retries=sum(t.num_retries for t in times),
        )
        return Rows([payload for payload, _ in results], row_bytes, timings)
