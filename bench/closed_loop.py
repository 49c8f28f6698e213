"""A load process: `concurrency` connections, each with one request in flight, as fast as the answers come.

Reads a LoadSpec from standard input, prints `ready`, waits for a line, runs, prints a LoadResult (bench.load).
"""

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import uvloop

from bench.client import Address, AsyncConnection, HttpError, Response, encode_request
from bench.load import STARTUP_S, LoadError, LoadResult, LoadSpec, check_spec

MAX_ERRORS = 100  # more than that is no measurement
HEADER_EVERY = 7  # answers whose headers are looked at

Load = Callable[[LoadSpec, Callable[[], object]], Coroutine[Any, Any, LoadResult]]


class Samples:
    """What is counted during one phase."""

    def __init__(self) -> None:
        self.latencies_ms: list[float] = []
        self.errors: Counter[str] = Counter()
        self._heads: list[Response] = []

    def add(self, answer: Response | HttpError, seconds: float) -> None:
        if isinstance(answer, HttpError):
            self.errors[str(answer)] += 1
        elif answer.status != 200:
            self.errors[f"{answer.status}: {answer.body[:200].decode(errors='replace')}"] += 1
        else:
            self.latencies_ms.append(round(seconds * 1000, 4))
            if len(self.latencies_ms) % HEADER_EVERY == 0:
                self._heads.append(Response(200, answer.head, b""))

    def result(self, seconds: float) -> LoadResult:
        return LoadResult(
            seconds=seconds,
            latencies_ms=self.latencies_ms,
            errors=dict(self.errors),
            headers_ms=header_means(self._heads),
        )


def header_means(responses: list[Response]) -> dict[str, float]:
    """Means of the headers `X-…-Ms`, by lower-case name."""
    sums: dict[str, float] = {}
    for response in responses:
        for name, value in response.headers().items():
            if name.startswith("x-") and name.endswith("-ms"):
                sums[name] = sums.get(name, 0.0) + float(value)
    return {name: round(total / len(responses), 4) for name, total in sums.items()}


class ClosedLoop:
    """Connections that send their next request as soon as they have an answer."""

    def __init__(self, address: Address, requests: list[bytes]) -> None:
        self._address = address
        self._requests = itertools.cycle(requests)
        self._connections: list[AsyncConnection] = []
        self._samples = Samples()
        self._left = 0
        self._num_in_flight = 0
        self._deadline = 0.0
        self._done = asyncio.Event()

    async def connect(self, count: int) -> None:
        self._connections = [await AsyncConnection.open(self._address, self._answered) for _ in range(count)]

    async def run(self, num_requests: int, max_seconds: float) -> LoadResult:
        """Sends up to `num_requests` within `max_seconds`, then waits for the last answers."""
        await self.connect_again()
        self._samples = Samples()
        self._left = num_requests
        self._num_in_flight = 0
        self._done.clear()
        began = time.perf_counter()
        self._deadline = began + max_seconds
        for connection in self._connections:
            self._send(connection)
        async with asyncio.timeout(max_seconds + STARTUP_S / 2):
            await self._done.wait()
        return self._samples.result(time.perf_counter() - began)

    async def connect_again(self) -> None:
        """Replaces connections that were lost."""
        for index, connection in enumerate(self._connections):
            if connection.closed:
                self._connections[index] = await AsyncConnection.open(self._address, self._answered)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _send(self, connection: AsyncConnection) -> None:
        if self._left > 0:
            self._left -= 1
            self._num_in_flight += 1
            connection.started = time.perf_counter()
            connection.send(next(self._requests))

    def _answered(self, connection: AsyncConnection, answer: Response | HttpError) -> None:
        now = time.perf_counter()
        self._num_in_flight -= 1
        self._samples.add(answer, now - connection.started)
        over = now >= self._deadline or sum(self._samples.errors.values()) >= MAX_ERRORS
        if over:
            self._left = 0
        if not connection.closed:
            self._send(connection)
        if self._num_in_flight == 0:
            self._done.set()


async def closed_loop(spec: LoadSpec, wait_for_go: Callable[[], object]) -> LoadResult:
    address = check_spec(spec)
    requests = [encode_request(address, spec.path, body.encode(), spec.headers) for body in spec.bodies]
    loop = ClosedLoop(address, requests)
    await loop.connect(spec.concurrency)
    try:
        if spec.num_warmup:
            await loop.run(spec.num_warmup, STARTUP_S / 2)
        wait_for_go()
        return await loop.run(spec.num_requests, spec.max_seconds)
    finally:
        loop.close()


def load_main(load: Load) -> None:
    """The process around a loop: spec in, `ready`, a line, result out."""

    def wait_for_go() -> None:
        print("ready", flush=True)
        if not sys.stdin.readline():
            sys.exit("the process that ordered this load is gone")

    spec = msgspec.json.decode(sys.stdin.readline(), type=LoadSpec)
    try:
        result = uvloop.run(load(spec, wait_for_go))
    except (LoadError, OSError, TimeoutError) as error:
        print(f"load on {spec.url}{spec.path} failed: {error or type(error).__name__}", flush=True)
        sys.exit(1)
    print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    load_main(closed_loop)
