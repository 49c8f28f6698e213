"""Timing of GPU work by CUDA graph replay, and errors against a reference. Knows nothing of what is measured."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BYTES_PER_S = 4.3e12  # measured ceilings of an H200
FLOP_PER_S = 790e12
_CACHE_BYTES = 120 << 20  # twice the L2

Run = Callable[[], Any]


def capture(calls: Sequence[Run]) -> torch.cuda.CUDAGraph:
    """All `calls` in one graph, after one warm-up of each distinct first call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graph_us(calls: Sequence[Run], *, replays: int = 11) -> float:
    """Median microseconds of one of the `calls`, replayed as one graph."""
    graph = capture(calls)
    for _ in range(2):
        graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) * 1e3 / len(calls)


def host_us(call: Run, repeats: int = 20) -> float:
    """Median microseconds that the host spends in `call`."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        torch.cuda.synchronize()
    return statistics.median(times)


def num_copies(num_bytes: float, most: int = 48) -> int:
    """How many sets of buffers to rotate so that the L2 does not hold what is read next."""
    return max(2, min(most, int(_CACHE_BYTES // max(1.0, num_bytes)) + 1))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖; NaN counts as infinite."""
    actual, expected = actual.float(), expected.float()
    error = ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def attempt(record: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`record` with what `measure` found, or with its error: one failing variant must not end the run."""
    try:
        record.update(measure())
    except Exception as error:  # noqa: BLE001 - recorded: the other variants must be measured all the same
        record["error"] = f"{type(error).__name__}: {str(error)[:400]}"
        try:
            torch.cuda.synchronize()
        except RuntimeError as fault:
            record["error"] += f" | device: {str(fault)[:200]}"
    return record


def warm_cache(wanted: str, *, processes: int | None = None) -> float:
    """Fills Triton's cache in parallel. Returns seconds taken."""
    begin = time.perf_counter()
    processes = processes or min(16, os.cpu_count() or 1)
    command = [sys.executable, "-m", "bench.micro.compile_kernels", wanted, "--shard"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    running = [
        subprocess.Popen([*command, f"{i}/{processes}"], env=environment, stdout=quiet, stderr=quiet)
        for i in range(processes)
    ]  # fmt: skip
    for process in running:
        process.wait()
    return time.perf_counter() - begin


def save(directory: str | None, name: str, document: dict[str, Any]) -> None:
    if directory is not None:
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(document, indent=1))


def versions() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "command": " ".join(sys.argv),
    }
