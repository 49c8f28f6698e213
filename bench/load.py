"""Load from processes of their own: what to send, what came of it, exact percentiles.

`run_load` starts one process for each spec (bench.closed_loop, bench.open_loop or bench.stream_loop), lets them
connect and warm up, releases all of them together and collects their results. Every run is bounded in requests and in
time.
"""

import math
import statistics
import subprocess
import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from bench.client import Address

STARTUP_S = 60.0  # to import, connect and warm up
GRACE_S = 30.0  # after max_seconds: for the answers still awaited


class LoadSpec(Struct, kw_only=True, forbid_unknown_fields=True):
    """What one load process does. With a `rate` arrivals are Poisson and latency counts from the planned arrival."""

    url: str
    path: str
    bodies: list[str]  # JSON texts, sent in turn
    concurrency: int = 1  # open loop: the most connections
    num_requests: int = 1000
    max_seconds: float = 20.0
    num_warmup: int = 50
    rate: float = 0.0  # requests/s; 0: closed loop
    headers: dict[str, str] = {}
    seed: int = 1
    stream: bool = False  # answers are streams of tokens; every body is sent once, the first num_warmup unmeasured
    allow_remote: bool = False


class LoadResult(Struct, kw_only=True):
    """What one load process saw. `latencies_ms` holds every good answer, in order of completion.

    Of streams: the time to the first token and the number of tokens of each, in the same order (`latencies_ms` is the
    time to the last token), and the gaps between events of all.
    """

    seconds: float
    latencies_ms: list[float]
    errors: dict[str, int] = {}
    headers_ms: dict[str, float] = {}  # means of the answers' X-…-Ms headers (tokenize, queue, compute)
    first_ms: list[float] = []
    gaps_ms: list[float] = []
    num_tokens: list[int] = []

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_ms) / self.seconds

    def percentile_ms(self, percent: float) -> float:
        return percentile(self.latencies_ms, percent)


class LoadError(RuntimeError):
    """A load process could not do its work; the text says why."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that `percent` of all samples do not exceed (nearest rank). NaN without samples."""
    if not samples:
        return math.nan
    rank = max(1, math.ceil(len(samples) * percent / 100))
    return sorted(samples)[rank - 1]


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def check_spec(spec: LoadSpec) -> Address:
    """The server's address. Raises LoadError for a remote server that was not allowed, and for empty work."""
    address = Address.of(spec.url)
    if not address.loopback and not spec.allow_remote:
        raise LoadError(
            f"{spec.url} is not this machine: load is sent to loopback only unless remote hosts are allowed"
        )
    if not spec.bodies or spec.concurrency < 1 or spec.num_requests < 1 or not 0 < spec.max_seconds <= 600:
        raise LoadError("a load needs bodies, concurrency >= 1, num_requests >= 1 and 0 < max_seconds <= 600")
    return address


def run_load(specs: Sequence[LoadSpec]) -> list[LoadResult]:
    """Results in the order of `specs`. Raises LoadError; no process outlives the call."""
    for spec in specs:
        check_spec(spec)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(map(_start, specs))  # a failure leaves those started in the list
        for process in processes:
            _expect_ready(process)
        for process in processes:  # all are connected and warm
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        return [_collect(process, spec) for process, spec in zip(processes, specs, strict=True)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def run_one(spec: LoadSpec) -> LoadResult:
    """One load process; raises LoadError when any of its requests failed."""
    result = run_load([spec])[0]
    if result.errors:
        raise LoadError(f"requests failed: {result.errors}")
    return result


def _start(spec: LoadSpec) -> "subprocess.Popen[bytes]":
    module = "bench.stream_loop" if spec.stream else "bench.open_loop" if spec.rate else "bench.closed_loop"
    command = [sys.executable, "-m", module]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    process.stdin.flush()
    return process


def _expect_ready(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if line != "ready":
        raise LoadError(f"a load process did not start: {line or f'exit code {process.wait(STARTUP_S)}'}")


def _collect(process: "subprocess.Popen[bytes]", spec: LoadSpec) -> LoadResult:
    try:
        output, _ = process.communicate(timeout=spec.max_seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        raise LoadError(f"a load process did not end within {spec.max_seconds + GRACE_S:.0f} s") from None
    if process.returncode != 0:
        raise LoadError(output.decode().strip() or f"a load process ended with code {process.returncode}")
    return msgspec.json.decode(output, type=LoadResult)
