"""The work of one request on its way: a Job of Chunks. Knows neither sockets nor which replica would be best."""

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from gateway.errors import GatewayError
from gateway.split import ChunkInput
from gateway.tasks import Rows
from ipc.types import OutputSpec, Priority, Timings

AbortReason = Literal["disconnect", "deadline", "stop"]


class Carrier(Protocol):
    """Where a chunk is in flight."""

    def abort(self, chunk: "Chunk", reason: AbortReason) -> None:
        """Forgets the chunk, and tells whoever works on it."""


class Chunk:
    """One chunk. `attempt` counts the replicas it was sent to and lost with, and the requeues there, together."""

    __slots__ = (
        "attempt",
        "cancelled",
        "carrier",
        "chunk_id",
        "deadline",
        "given_back",
        "input",
        "job",
        "priority",
        "refused",
        "spec",
    )

    def __init__(self, job: "Job", work: ChunkInput, spec: OutputSpec, priority: Priority, deadline: float) -> None:
        self.job = job
        self.input = work
        self.spec = spec
        self.priority: Priority = priority
        self.deadline = deadline  # on the loop's clock
        self.attempt = 1
        self.chunk_id = 0  # a new one each time it is sent
        self.carrier: Carrier | None = None
        self.refused: set[str] = set()  # replicas whose pool was full
        self.given_back = False  # a replica had taken it, and lost its ranks
        self.cancelled = False


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
        self.chunks = [Chunk(self, work, spec, priority, deadline) for work in inputs]
        self._forget = forget
        self._results: dict[int, tuple[bytes, Timings]] = {}  # by the chunk's first sequence

    def succeeded(self, chunk: Chunk, payload: bytes, row_bytes: int, timings: Timings) -> None:
        self._results[chunk.input.first] = (payload, timings)
        if len(self._results) == len(self.chunks) and not self.future.done():
            self.future.set_result(self._gather(row_bytes))

    def failed(self, error: GatewayError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.abort("stop")

    def abort(self, reason: AbortReason) -> None:
        """Ends what is still in flight or waiting."""
        for chunk in self.chunks:
            chunk.cancelled = True
            if chunk.carrier is None:
                self._forget(chunk)
            else:
                chunk.carrier.abort(chunk, reason)
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # seen, should nobody wait for it any more

    def _gather(self, row_bytes: int) -> Rows:
        results = [self._results[chunk.input.first] for chunk in self.chunks]
        if len(results) == 1:
            return Rows([results[0][0]], row_bytes, results[0][1])
        times = [timings for _, timings in results]
        timings = Timings(
            queue_ms=max(t.queue_ms for t in times),
            compute_ms=max(t.compute_ms for t in times),
            num_steps=sum(t.num_steps for t in times),
            num_retries=sum(t.num_retries for t in times),
        )
        return Rows([payload for payload, _ in results], row_bytes, timings)
