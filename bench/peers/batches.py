"""Prompts to a peer in this process, batch after batch, and what its times say."""

import itertools
import time
from collections.abc import Callable

from bench.load import LoadResult

Batch = Callable[
    [list[list[int]]], list[list[float]]
]  # prompts -> of each, when its tokens were known, in ms from the start


def in_batches(prompts: list[list[int]], in_flight: int, batch: Batch) -> LoadResult:
    result = LoadResult(seconds=0.0, latencies_ms=[])
    began = time.perf_counter()
    for start in range(0, len(prompts), in_flight):
        for times_ms in batch(prompts[start : start + in_flight]):
            result.first_ms.append(times_ms[0])
            result.latencies_ms.append(times_ms[-1])
            result.gaps_ms += [b - a for a, b in itertools.pairwise(times_ms)]
            result.num_tokens.append(len(times_ms))
    result.seconds = time.perf_counter() - began
    return result
