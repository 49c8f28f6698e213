"""Our own stack, over HTTP, as `bouquet up` starts it."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.client import Address, Connection, encode_request
from bench.peers import Setup
from bench.stack import real_stack

NUM_IN_FLIGHT = 4  # requests, when there are many texts


class Ours:
    label = "bouquet over HTTP"
    batch_sizes = (32, 64, 128)  # texts in a request

    @contextmanager
    def launch(self, setup: Setup) -> Iterator[None]:
        with real_stack() as stack, ExitStack() as opened:
            self._model = setup.model
            self._address = Address.of(stack.url)
            self._connections = [opened.enter_context(Connection(self._address)) for _ in range(NUM_IN_FLIGHT)]
            self._pool = opened.enter_context(ThreadPoolExecutor(NUM_IN_FLIGHT))
            yield

    def encode(self, texts: list[str], batch_size: int) -> NDArray[np.float32]:
        batches = [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]
        if len(batches) == 1:
            return self._request(self._connections[0], batches[0])
        parts: dict[int, NDArray[np.float32]] = {}
        queue = iter(enumerate(batches))  # shared: each batch is taken once

        def work(connection: Connection) -> None:
            for index, batch in queue:
                parts[index] = self._request(connection, batch)

        for _ in self._pool.map(work, self._connections):
            pass
        return np.concatenate([parts[index] for index in range(len(batches))])

    def _request(self, connection: Connection, texts: list[str]) -> NDArray[np.float32]:
        body = msgspec.json.encode({"model": self._model, "input": texts, "encoding_format": "base64"})
        response = connection.request(encode_request(self._address, "/v1/embeddings", body))
        if response.status != 200:
            raise RuntimeError(f"/v1/embeddings answered {response.status}: {response.body[:300].decode()}")
        rows = msgspec.json.decode(response.body)["data"]
        return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows])
