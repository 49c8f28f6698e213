"""From `bouquet up` to the first request that could be answered, phase by phase, from the processes' own logs.

    python -m bench.micro.startup

The phases follow the slowest chain: the command, the rank (imports, hello, weights and first forward), readiness.
"""

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path

from bench import report
from bench.load import median
from bench.report import Row
from bench.stack import RunningStack, StackFailed, end_in_order_when_told, real_stack

GOAL_MS = 15_000
Events = dict[tuple[str, str], float]  # (program, event) → seconds since the epoch, first occurrence

RANK, SCHEDULER, GATEWAY = "-rank-0", "-scheduler", "gateway-0"
CHAIN: tuple[tuple[str, str, str], ...] = (  # phase, program, event that ends it
    ("bouquet up: configuration, files, supervisord", RANK, "begun"),
    ("rank: Python, configuration", RANK, "started"),
    ("rank: imports (torch)", RANK, "imported"),
    ("rank: model's files, hello", RANK, "waiting_for_scheduler"),
    ("join", SCHEDULER, "epoch_begins"),
    ("rank: weights, memory, first forward", SCHEDULER, "ranks_ready"),
)
BESIDE: tuple[tuple[str, str, str], ...] = (
    ("scheduler bound", SCHEDULER, "scheduler_started"),
    ("gateway imported", GATEWAY, "imported"),
    ("gateway listening", GATEWAY, "listening"),
)


def read_events(logs: list[Path]) -> Events:
    """First occurrence of every event of every program; `begun` is when the kernel started the process."""
    found: Events = {}
    for log in logs:
        for text in log.read_text().splitlines():
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            time_s = datetime.fromisoformat(line["ts"]).timestamp()
            found.setdefault((line["process"], line["event"]), time_s)
            if line["event"] == "started":
                found.setdefault((line["process"], "begun"), time_s - line["up_ms"] / 1000)
    return found


def find(events: Events, program: str, event: str) -> float:
    """When a program whose name ends in `program` came to `event`. Raises KeyError."""
    for (name, what), time_s in events.items():
        if name.endswith(program) and what == event:
            return time_s
    raise KeyError(f"no {event!r} in the log of {program}")


def phases(stack: RunningStack) -> dict[str, float]:
    """Milliseconds by phase; those of the chain sum up to `total`, the others count from the start."""
    events = read_events(stack.logs)
    result: dict[str, float] = {}
    last = stack.started
    for phase, program, event in CHAIN:
        reached = find(events, program, event)
        result[phase] = (reached - last) * 1000
        last = reached
    result["readiness seen over HTTP"] = (stack.ready - last) * 1000
    result["total"] = (stack.ready - stack.started) * 1000
    for milestone, program, event in BESIDE:
        result[f"(beside) {milestone} at"] = (find(events, program, event) - stack.started) * 1000
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.startup", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hardware", default="cpu", help="short name of the machine, part of the file's name")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where the files go")
    args = parser.parse_args()
    end_in_order_when_told()
    into = report.new_report("startup", args.hardware)
    runs = []
    try:
        for repeat in range(args.repeats):
            print(f"start {repeat + 1} of {args.repeats}", file=sys.stderr, flush=True)
            with real_stack() as stack:
                runs.append(phases(stack))
    except (StackFailed, KeyError) as error:
        sys.exit(f"bench: {error}")
    for phase in runs[0]:
        goal = f"< {GOAL_MS:,}" if phase == "total" else None
        into.rows.append(Row("start-up", phase, "ms", round(median([run[phase] for run in runs]), 1), goal=goal))
    into.details["totals_ms"] = [round(run["total"], 1) for run in runs]
    into.notes.append("medians over starts; files are in the page cache, the model has been fetched before")
    path = report.write(into, args.results)
    print("\n".join(report.table_lines(into.rows)))
    print(path)


if __name__ == "__main__":
    main()
