"""A load process: requests arrive at random (Poisson) at a given rate, whether or not the server keeps up.

Latency counts from the planned arrival, so a server that falls behind shows it. Same protocol as bench.closed_loop.
"""

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Callable

from bench.client import Address, AsyncConnection, HttpError, Response, encode_request
from bench.closed_loop import MAX_ERRORS, ClosedLoop, Samples, load_main
from bench.load import STARTUP_S, LoadResult, LoadSpec, check_spec


class OpenLoop:
    """Arrivals on a schedule; a free connection takes each, and they queue when all are busy."""

    def __init__(self, address: Address, requests: list[bytes], max_connections: int) -> None:
        self._address = address
        self._requests = itertools.cycle(requests)
        self._max_connections = max_connections
        self._free: list[AsyncConnection] = []
        self._all: set[AsyncConnection] = set()
        self._queue: deque[float] = deque()  # planned arrivals not sent yet
        self._num_awaited = 0
        self._samples = Samples()
        self._changed = asyncio.Event()

    async def run(self, rate: float, num_requests: int, max_seconds: float, seed: int) -> LoadResult:
        generator = random.Random(seed)
        began = planned = time.perf_counter()
        for _ in range(num_requests):
            planned += generator.expovariate(rate)
            if planned - began > max_seconds or sum(self._samples.errors.values()) >= MAX_ERRORS:
                break
            if (wait := planned - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            self._queue.append(planned)
            self._num_awaited += 1
            await self._grow()
            self._send_queued()
        async with asyncio.timeout(STARTUP_S / 2):
            while self._num_awaited:
                self._changed.clear()
                await self._grow()
                self._send_queued()
                await self._changed.wait()
        return self._samples.result(time.perf_counter() - began)

    async def _grow(self) -> None:
        if not self._free and len(self._all) < self._max_connections:
            connection = await AsyncConnection.open(self._address, self._answered)
            self._all.add(connection)
            self._free.append(connection)

    def _send_queued(self) -> None:
        while self._queue and self._free:
            connection = self._free.pop()
            if connection.closed:
                self._all.discard(connection)
                continue
            connection.started = self._queue.popleft()
            connection.send(next(self._requests))

    def _answered(self, connection: AsyncConnection, answer: Response | HttpError) -> None:
        self._samples.add(answer, time.perf_counter() - connection.started)
        self._num_awaited -= 1
        if connection.closed:
            self._all.discard(connection)
        else:
            self._free.append(connection)
        self._changed.set()
        self._send_queued()

    def close(self) -> None:
        for connection in self._all:
            connection.close()


async def open_loop(spec: LoadSpec, wait_for_go: Callable[[], object]) -> LoadResult:
    address = check_spec(spec)
    requests = [encode_request(address, spec.path, body.encode(), spec.headers) for body in spec.bodies]
    if spec.num_warmup:
        warm = ClosedLoop(address, requests)
        await warm.connect(1)
        await warm.run(spec.num_warmup, STARTUP_S / 2)
        warm.close()
    loop = OpenLoop(address, requests, spec.concurrency)
    wait_for_go()
    try:
        return await loop.run(spec.rate, spec.num_requests, spec.max_seconds, spec.seed)
    finally:
        loop.close()


if __name__ == "__main__":
    load_main(open_loop)
