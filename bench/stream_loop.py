"""A load process: `concurrency` streams of tokens in flight, each followed by the next one. See bench.load.

Every body is sent once, the first `num_warmup` before the clock starts. A stream's events are stamped when the bytes
that complete them have been read.
"""

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable

from bench.client import Address, HttpError, encode_request
from bench.closed_loop import MAX_ERRORS, load_main
from bench.load import STARTUP_S, LoadResult, LoadSpec, check_spec
from bench.sse import StreamParser

_NUM_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_ERROR = re.compile(rb'^\{\s*"error"')


class StreamFailed(RuntimeError):
    """A stream ended otherwise than it should."""


class Stream:
    """What one stream was like: when its events came, and how many tokens the server says they held."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.times: list[float] = []  # of the events that carry a choice
        self.num_tokens = 0

    def take(self, events: list[bytes], now: float) -> None:
        """Raises StreamFailed for an event that is an error."""
        for event in events:
            if _ERROR.match(event):
                raise StreamFailed(event[:200].decode(errors="replace"))
            if b'"choices":[{' in event or b'"choices": [{' in event:
                self.times.append(now)
            if found := _NUM_TOKENS.search(event):
                self.num_tokens = int(found[1])

    def add_to(self, result: LoadResult) -> None:
        if not self.times or not self.num_tokens:
            raise StreamFailed(f"a stream of {len(self.times)} events and {self.num_tokens} tokens")
        result.first_ms.append(_ms(self.times[0] - self.began))
        result.latencies_ms.append(_ms(self.times[-1] - self.began))
        result.gaps_ms += [_ms(b - a) for a, b in itertools.pairwise(self.times)]
        result.num_tokens.append(self.num_tokens)


async def run_streams(address: Address, requests: list[bytes], concurrency: int, max_seconds: float) -> LoadResult:
    """Sends all `requests`, beginning none after `max_seconds`."""
    waiting = iter(requests)  # shared: each is taken once
    result, errors = LoadResult(seconds=0.0, latencies_ms=[]), Counter[str]()
    began = time.perf_counter()
    deadline = began + max_seconds

    async def work() -> None:
        link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for request in waiting:
            if time.perf_counter() > deadline or errors.total() >= MAX_ERRORS:
                break
            link = link or await asyncio.open_connection(address.host, address.port)
            try:
                stream, keep = await _follow(*link, request)
                stream.add_to(result)
            except (StreamFailed, HttpError, OSError) as error:
                errors[str(error)] += 1
                keep = False
            if not keep:
                link[1].close()
                link = None
        if link is not None:
            link[1].close()

    async with asyncio.timeout(max_seconds + STARTUP_S / 2), asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())
    result.seconds = time.perf_counter() - began
    result.errors = dict(errors)
    return result


async def _follow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[Stream, bool]:
    """One request to its end, and whether the connection can take another. Raises StreamFailed, HttpError, OSError."""
    stream, parser = Stream(time.perf_counter()), StreamParser()
    writer.write(request)
    while not parser.done:
        if not (data := await reader.read(1 << 18)):
            raise HttpError("the server closed the connection in the middle of a stream")
        stream.take(parser.feed(data), time.perf_counter())
    if (answer := parser.refused) is not None:
        raise StreamFailed(f"{answer.status}: {answer.body[:200].decode(errors='replace')}")
    return stream, parser.keep_alive


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)


async def stream_loop(spec: LoadSpec, wait_for_go: Callable[[], object]) -> LoadResult:
    address = check_spec(spec)
    requests = [encode_request(address, spec.path, body.encode(), spec.headers) for body in spec.bodies]
    if spec.num_warmup:
        await run_streams(address, requests[: spec.num_warmup], spec.concurrency, STARTUP_S / 2)
    wait_for_go()
    return await run_streams(address, requests[spec.num_warmup :], spec.concurrency, spec.max_seconds)


if __name__ == "__main__":
    load_main(stream_loop)
