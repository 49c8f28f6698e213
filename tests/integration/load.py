"""Load on a running stack in which every answer is checked against what it must be."""

import asyncio
import base64
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import numpy as np
from numpy.typing import NDArray

Expected = Callable[[list[int]], NDArray[np.float32]]


@dataclass
class Outcome:
    """What became of the requests sent."""

    num_right: int = 0
    num_wrong: int = 0
    statuses: Counter[int] = field(default_factory=Counter)  # of answers other than 200
    errors: Counter[str] = field(default_factory=Counter)  # connections that broke
    bodies: list[str] = field(default_factory=list)
    slowest: float = 0.0

    @property
    def num_failed(self) -> int:
        return sum(self.statuses.values()) + sum(self.errors.values())


class Load:
    """`num_workers` clients in a closed loop until `stop`; each request is 1 to `max_rows` rows of token ids,
    random ones or drawn from `rows`."""

    def __init__(
        self,
        url: str,
        model: str,
        expected: Expected,
        *,
        num_workers: int = 8,
        max_rows: int = 4,
        max_tokens: int = 40,
        pause: float = 0.005,
        keep_alive: bool = True,
        rows: list[list[int]] | None = None,
    ) -> None:
        self.outcome = Outcome()
        self._url, self._model, self._expected = url, model, expected
        self._num_workers, self._max_rows, self._max_tokens = num_workers, max_rows, max_tokens
        self._pause, self._keep_alive, self._rows = pause, keep_alive, rows
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        connector = aiohttp.TCPConnector(limit=0, force_close=not self._keep_alive)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))
        self._tasks = [asyncio.create_task(self._work(random.Random(seed))) for seed in range(self._num_workers)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        await self._session.close()

    async def answered(self, count: int, seconds: float = 30.0) -> None:
        """Waits for `count` more right answers. Raises TimeoutError."""
        target = self.outcome.num_right + count
        async with asyncio.timeout(seconds):
            while self.outcome.num_right < target:
                await asyncio.sleep(0.01)

    async def _work(self, generator: random.Random) -> None:
        while not self._stopping.is_set():
            rows = [self._draw(generator) for _ in range(generator.randint(1, self._max_rows))]
            started = time.monotonic()
            await self._send(rows)
            self.outcome.slowest = max(self.outcome.slowest, time.monotonic() - started)
            await asyncio.sleep(self._pause)

    def _draw(self, generator: random.Random) -> list[int]:
        if self._rows is not None:
            return generator.choice(self._rows)
        return [generator.randrange(1000, 30000) for _ in range(generator.randint(1, self._max_tokens))]

    async def _send(self, rows: list[list[int]]) -> None:
        body = {"model": self._model, "input": rows, "encoding_format": "base64"}
        try:
            async with self._session.post(f"{self._url}/v1/embeddings", json=body) as response:
                if response.status != 200:
                    self.outcome.statuses[response.status] += 1
                    self.outcome.bodies.append((await response.text())[:300])
                    return
                answer = await response.json()
        except aiohttp.ClientError as error:
            self.outcome.errors[type(error).__name__] += 1
            return
        self._check(rows, answer)

    def _check(self, rows: list[list[int]], answer: dict) -> None:  # type: ignore[type-arg]
        vectors = [np.frombuffer(base64.b64decode(item["embedding"]), np.float32) for item in answer["data"]]
        right = len(vectors) == len(rows) and all(
            np.allclose(vector, self._expected(row), atol=1e-5) for vector, row in zip(vectors, rows, strict=True)
        )
        if right:
            self.outcome.num_right += 1
        else:
            self.outcome.num_wrong += 1
