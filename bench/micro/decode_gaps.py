"""What lies between the replays of decode steps that a scheduler sends two in flight: microseconds, from a profile.

A gap is from the end of a replay's last kernel to the start of the next one's first: copies of outputs and inputs are
in it, and the launch of a graph. Idle time inside a replay is not.
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from bench.micro.random_decoders import Seated

NUM_STEPS = 40


class Span(NamedTuple):
    """Something the device did, microseconds."""

    begin: float
    end: float
    is_copy: bool


def gaps(spans: list[Span]) -> list[float]:
    """Microseconds between kernels around each run of copies: [steps - 1] of a profile of whole steps."""
    found: list[float] = []
    last: float | None = None
    copied = False
    for span in sorted(spans):
        if span.is_copy:
            copied = True
            continue
        if copied and last is not None:
            found.append(max(0.0, span.begin - last))
        last, copied = max(span.end, last or 0.0), False
    return found


def measure(bench: Seated, rows: tuple[int, ...], left: Callable[[], float]) -> list[dict[str, Any]]:
    records = []
    for num_rows in rows:
        if left() <= 0:
            break
        bench.seat()
        bench.tokens(num_rows, 4, in_flight=2)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            bench.tokens(num_rows, NUM_STEPS, in_flight=2)
            torch.cuda.synchronize()
        spans = [
            Span(event.time_range.start, event.time_range.end, event.name.startswith("Memcpy"))
            for event in trace.events()
            if event.device_type.name == "CUDA"
        ]
        between = gaps(spans)
        total = max(span.end for span in spans) - min(span.begin for span in spans)
        record = {
            "rows": num_rows,
            "steps": NUM_STEPS,
            "gap_us": statistics.median(between),
            "longest_gap_us": max(between),
            "step_us": total / NUM_STEPS,
            "share": sum(between) / total,
        }
        records.append(record)
        print(f"   {gap_line(record)}", flush=True)
    return records


def gap_line(record: dict[str, Any]) -> str:
    return (
        f"{record['rows']:4d} rows: gaps of {record['gap_us']:.1f} us (longest {record['longest_gap_us']:.1f}) between "
        f"replays, steps of {record['step_us']:.0f} us: {record['share']:.2%}"
    )
