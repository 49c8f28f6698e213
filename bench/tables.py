"""The cases of the four tables over HTTP, and one measurement of one case on one server.

Table 1: one input at a time. 2: batches, scored and embedded. 3: throughput of four client processes. 4: several
requests in flight, as token ids and as text. Every input is sent once to each server.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from bench.client import Address, Connection, encode_request
from bench.load import LoadError, LoadResult, LoadSpec, run_load
from bench.peers import Endpoint
from bench.token_inputs import TokenInputs

SEQUENTIAL_SECONDS = 4.0  # of one case in one repeat, at most
LOAD_SECONDS = 15.0
PATHS = {"embed": "/v1/embeddings", "pplx": "/v1/embeddings"}


class Case(Struct, frozen=True):
    """One line of a table. `goals`: ours against the peer, and the most p99 / p50."""

    table: str
    name: str
    model: Literal["embed", "score", "pplx"]
    batch: int
    length: int  # tokens of each input
    num_requests: int  # of each client process, in one repeat
    form: Literal["ids", "text"] = "ids"
    num_processes: int = 1
    in_flight: int = 1
    goal: float | None = None

    @property
    def is_rate(self) -> bool:
        return self.num_processes > 1

    @property
    def group(self) -> str:
        """Cases for which one variant of a peer is chosen."""
        return f"{self.table} {self.model}"

    @property
    def ours_alone(self) -> bool:
        return self.model == "pplx"

    @property
    def gpu_key(self) -> str:
        """Under which bench.gpu_time keeps the GPU's time for this batch."""
        return f"{self.model} {self.batch}x{self.length}"


def cases() -> list[Case]:
    """All lines, most telling tables first: when time runs out, it is throughput that has fewer repeats."""
    latency = ((128, 100, 6.0, 100), (512, 100, 5.0, 100), (4096, 50, 1.8, 50))
    found = [Case("1", f"1 x {n}", "embed", 1, n, count, goal=goal) for n, count, goal, _ in latency]
    found += [Case("1", f"pplx 1 x {n}", "pplx", 1, n, count) for n, _, _, count in latency]
    batches = ((5, 40, 7.0), (25, 30, 2.3), (50, 24, 2.0))
    for model, what in (("score", "score"), ("embed", "embed"), ("pplx", "pplx")):
        for size, count, goal in batches:
            aimed = goal if model != "pplx" else None
            found.append(Case("2", f"{what} {size} x 512", model, size, 512, count, goal=aimed))  # type: ignore[arg-type]
    levels = ((1, 60, 4.4, 3.2), (2, 80, 4.5, 3.8), (4, 120, 4.8, 4.5), (8, 160, 4.0, 4.0), (16, 320, 2.1, 2.1))
    for k, count, ids, text in levels:
        for form, goal in (("ids", ids), ("text", text)):
            name = f"1 x 512 {form}, {k} in flight"
            found.append(Case("4", name, "embed", 1, 512, count, form=form, in_flight=k, goal=goal))  # type: ignore[arg-type]
    for n, count, goal in ((512, 5, 1.45), (1024, 3, 1.3), (4096, 2, 1.2)):
        found.append(Case("3", f"100 x {n}, 4 clients", "embed", 100, n, count, num_processes=4, goal=goal))
    for n, count in ((512, 5), (1024, 3), (4096, 2)):
        found.append(Case("3", f"pplx 100 x {n}, 4 clients", "pplx", 100, n, count, num_processes=4))
    return found


class Work(Struct):
    """Inputs of one case and repeat: requests that do not count, then those of each client process."""

    warmup: list[list[Any]]
    requests: list[list[list[Any]]]


def make_work(case: Case, inputs: TokenInputs, num_warmup: int) -> Work:
    """Fresh inputs. Raises NotEnoughText."""
    take = inputs.take_ids if case.form == "ids" else inputs.take_texts

    def requests(count: int) -> list[list[Any]]:
        flat = take(case.length, count * case.batch)
        return [list(flat[at : at + case.batch]) for at in range(0, len(flat), case.batch)]

    return Work(requests(num_warmup), [requests(case.num_requests) for _ in range(case.num_processes)])


def target(endpoint: Endpoint, case: Case) -> tuple[str, str, Callable[[list[Any]], bytes]]:
    """URL, path and body of a request."""
    if case.model == "score":

        def score_body(batch: list[Any]) -> bytes:
            return msgspec.json.encode({"model": "score", endpoint.score_field: batch})

        return endpoint.score_url, endpoint.score_path, score_body

    def embed_body(batch: list[Any]) -> bytes:
        return msgspec.json.encode({"model": case.model, "input": batch, "encoding_format": "base64"})

    return endpoint.embed_url, PATHS[case.model], embed_body


def measure(endpoint: Endpoint, case: Case, work: Work) -> LoadResult:
    """One case on one server: warm-up, then the timed requests. Raises LoadError when one fails."""
    if case.num_processes == 1 and case.in_flight == 1:
        return one_at_a_time(endpoint, case, work)
    url, path, body = target(endpoint, case)
    for batch in work.warmup:  # with its own connection, one by one
        ask(Connection(Address.of(url)), url, path, body(batch))
    results = run_load(
        [
            LoadSpec(
                url=url,
                path=path,
                bodies=[body(batch).decode() for batch in batches],
                concurrency=case.in_flight,
                num_requests=len(batches),
                max_seconds=LOAD_SECONDS,
                num_warmup=0,
            )
            for batches in work.requests
        ]
    )
    if errors := {text: count for result in results for text, count in result.errors.items()}:
        raise LoadError(f"{endpoint.name}: {case.name}: requests failed: {errors}")
    return LoadResult(
        seconds=max(result.seconds for result in results),
        latencies_ms=[value for result in results for value in result.latencies_ms],
        headers_ms=results[0].headers_ms,
    )


def one_at_a_time(endpoint: Endpoint, case: Case, work: Work) -> LoadResult:
    """Strictly sequential on one connection, from this process."""
    url, path, body = target(endpoint, case)
    address = Address.of(url)
    encoded = [encode_request(address, path, body(batch)) for batch in work.requests[0]]
    latencies: list[float] = []
    with Connection(address) as connection:
        for batch in work.warmup:
            ask(connection, url, path, body(batch))
        gc.collect()
        gc.disable()
        began = time.perf_counter()
        try:
            for request in encoded:
                sent = time.perf_counter()
                response = connection.request(request)
                now = time.perf_counter()
                if response.status != 200:
                    raise LoadError(f"{endpoint.name}: {case.name}: {response.status} {response.body[:300]!r}")
                latencies.append(round((now - sent) * 1000, 4))
                if now - began > SEQUENTIAL_SECONDS:
                    break
        finally:
            gc.enable()
    return LoadResult(seconds=now - began, latencies_ms=latencies)


def ask(connection: Connection, url: str, path: str, body: bytes) -> Any:
    """One answer, decoded. Raises LoadError for an error."""
    response = connection.request(encode_request(Address.of(url), path, body))
    if response.status != 200:
        raise LoadError(f"{url}{path}: {response.status} {response.body[:500].decode(errors='replace')}")
    return msgspec.json.decode(response.body)


def rate(case: Case, results: Sequence[LoadResult]) -> float:
    """Embeddings per second over repeats."""
    return case.batch * sum(len(r.latencies_ms) for r in results) / sum(r.seconds for r in results)
