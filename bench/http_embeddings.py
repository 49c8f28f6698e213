"""The suite `embeddings` against servers: the four tables of bench.tables, ours and peers on one machine.

Agreement first. Then repeats: in each, every case goes to all servers in turn, the first one rotating, with inputs
that no server has seen. After the first repeat only the best variant of a peer goes on; variants called …-default are
measured once and stand beside. What has been measured is written after every repeat.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, structs, to_builtins

from bench import agreement
from bench.client import HttpError
from bench.load import LoadError, LoadResult, percentile
from bench.peers import Endpoint
from bench.report import Report, Row, compare
from bench.tables import Case, Work, make_work, measure, rate
from bench.tcp import over_tcp
from bench.token_inputs import TokenInputs

WARMUP_FIRST, WARMUP_LATER = 6, 2
PERCENTILES = (("p50_ms", 50.0), ("p90_ms", 90.0), ("p99_ms", 99.0), ("max_ms", 100.0))
MAIN_METRICS = ("p50_ms", "embeddings_per_s")
MAX_TAIL = 1.5  # p99 over p50, after warm-up
FAILURES = (LoadError, HttpError, OSError, TimeoutError)
BESIDE = "-default"
TCP = "tcp"  # as a form, in the names of cases

Samples = dict[tuple[str, str], list[LoadResult]]  # (case, endpoint) → one a repeat


class Options(Struct, frozen=True):
    repeats: int = 3
    budget_s: float = 480.0
    gpu_ms: dict[str, float] = {}  # bench.gpu_time
    tcp_run_dir: Path | None = None  # our run directory, to measure over tcp as well
    quick: bool = False


def run(
    report: Report,
    cases: list[Case],
    ours: Endpoint,
    peers: list[Endpoint],
    inputs: TokenInputs,
    options: Options,
    save: Callable[[Report], object],
) -> None:
    """Fills `report` and saves it as it goes. Time that runs out ends it early, after whole cases."""
    deadline = time.monotonic() + options.budget_s
    check_agreement(report, ours, peers, inputs)
    shapes_first(ours, inputs, options.quick)
    samples: Samples = {}
    best: dict[str, str] = {}  # group of cases → variant; empty until all have been measured once
    for repeat in range(options.repeats):
        began = time.monotonic()
        for case in cases:
            if time.monotonic() > deadline:
                report.notes.append(f"time ran out in repeat {repeat + 1}, before {case.name!r} of table {case.table}")
                break
            able = [peer for peer in peers if takes_part(case, peer, best)]
            measure_case(case, repeat, [ours, *able], inputs, samples, report)
        if repeat == 0:
            if options.tcp_run_dir is not None:
                measure_tcp(cases, ours, inputs, options.tcp_run_dir, samples, report)
            best = report.details["best_variant"] = best_variants(cases, peers, samples)
        say(f"repeat {repeat + 1} took {time.monotonic() - began:.0f} s")
        fill(report, cases, ours, peers, samples, options.gpu_ms)
        save(report)
        if time.monotonic() > deadline:
            break


def check_agreement(report: Report, ours: Endpoint, peers: list[Endpoint], inputs: TokenInputs) -> None:
    """Into the report, whatever it is: a disagreement is the first note and is said aloud."""
    found = []
    for peer in peers:
        try:
            found.append(agreement.compare(ours, peer, inputs))
        except FAILURES as error:
            report.notes.append(f"NOT COMPARED with {peer.name}: {str(error)[:300]}")
            say(report.notes[-1])
    report.details["agreement"] = [to_builtins(one) for one in found]
    for one in found:
        text = (
            f"before timing, {one.peer}: smallest cosine {one.min_cosine:.6f} (largest between different inputs "
            f"{one.spread:.3f})"
        )
        if one.max_score_difference is not None and one.score_range is not None:
            low, high = one.score_range
            text += f", largest difference of scores {one.max_score_difference:.5f} (scores {low:.3f} to {high:.3f})"
        if not one.holds:
            text = f"DISAGREEMENT, figures do not compare: {text}"
        say(text)
        report.notes.append(text)


def shapes_first(ours: Endpoint, inputs: TokenInputs, quick: bool) -> None:
    """Every batch that concurrent requests may form, three times: a graph is captured at a shape's second sight."""
    for size in range(1, 3 if quick else 17):
        case = Case("4", "warm-up", "embed", size, 512, 1)
        with suppress(*FAILURES):  # the case itself will tell
            measure(ours, case, make_work(case, inputs, 2))


def measure_case(
    case: Case, repeat: int, endpoints: list[Endpoint], inputs: TokenInputs, samples: Samples, report: Report
) -> None:
    """All servers in turn, with the same fresh inputs. A server that fails is noted; the others go on."""
    work = make_work(case, inputs, num_warmup(case, repeat))
    turn = repeat % len(endpoints)
    for endpoint in endpoints[turn:] + endpoints[:turn]:
        began = time.monotonic()
        try:
            result = measure(endpoint, case, work)
        except FAILURES as error:
            failure = f"FAILED: {case.name!r}, repeat {repeat + 1}, {endpoint.name}: {str(error)[:300]}"
            say(failure)
            report.notes.append(failure)
            continue
        samples.setdefault((case.name, endpoint.name), []).append(result)
        figure = f"{rate(case, [result]):.1f} /s" if case.is_rate else f"p50 {result.percentile_ms(50):.3f} ms"
        say(f"{case.name:32s} {endpoint.name:14s} {figure:18s} ({time.monotonic() - began:.1f} s)")


def shortened(cases: list[Case]) -> list[Case]:
    """A few small requests of every kind, to see that all works."""
    return [
        structs.replace(case, batch=min(case.batch, 4), length=min(case.length, 128), num_requests=3) for case in cases
    ]


def takes_part(case: Case, peer: Endpoint, best: dict[str, str]) -> bool:
    """All variants in the first repeat, then the best of the case's group."""
    if case.ours_alone or (case.model == "score" and not peer.score_url):
        return False
    if best:
        return best.get(case.group) == peer.name
    return not peer.name.endswith(BESIDE) or case.form == "ids"


def num_warmup(case: Case, repeat: int) -> int:
    if case.is_rate:
        return 1 if repeat == 0 else 0
    return WARMUP_FIRST if repeat == 0 else WARMUP_LATER


def measure_tcp(
    cases: list[Case], ours: Endpoint, inputs: TokenInputs, run_dir: Path, samples: Samples, report: Report
) -> None:
    """Table 4's token ids once more, with gateway and scheduler joined by tcp instead of a Unix socket."""
    with over_tcp(run_dir) as switched:
        if not switched:
            report.notes.append("not measured over tcp: the schedulers listen on no tcp endpoint")
            return
        for case in cases:
            if case.table == "4" and case.form == "ids":
                work: Work = make_work(case, inputs, WARMUP_LATER)
                result = measure(ours, case, work)
                samples.setdefault((tcp_name(case), ours.name), []).append(result)
                say(f"{tcp_name(case):32s} {ours.name:14s} p50 {result.percentile_ms(50):.3f} ms")


def tcp_name(case: Case) -> str:
    return case.name.replace(case.form, TCP)


def best_variants(cases: list[Case], peers: list[Endpoint], samples: Samples) -> dict[str, str]:
    """Group of cases → the variant with the highest geometric mean; those `beside` do not stand for election."""
    variants = [peer.name for peer in peers if not peer.name.endswith(BESIDE)]
    best: dict[str, str] = {}
    for group in dict.fromkeys(case.group for case in cases):
        members = [case for case in cases if case.group == group]
        merits = {
            name: [math.log(merit(case, samples[case.name, name])) for case in members if (case.name, name) in samples]
            for name in variants
        }
        if any(merits.values()):
            best[group] = max(
                (name for name in variants if merits[name]), key=lambda name: statistics.fmean(merits[name])
            )
    return best


def merit(case: Case, results: list[LoadResult]) -> float:
    """More is better."""
    return rate(case, results) if case.is_rate else 1 / percentile(pooled(results), 50)


def pooled(results: list[LoadResult]) -> list[float]:
    return [value for result in results for value in result.latencies_ms]


def fill(
    report: Report,
    cases: list[Case],
    ours: Endpoint,
    peers: list[Endpoint],
    samples: Samples,
    gpu_ms: dict[str, float],
) -> None:
    """Rows and details anew from all samples."""
    report.rows = []
    best: dict[str, str] = report.details.get("best_variant", {})
    labels = {peer.name: peer.label for peer in peers}
    for case in with_tcp(cases, samples):
        mine = samples.get((case.name, ours.name))
        if not mine:
            continue
        shown = [name for name in (best.get(case.group), *(n for n in labels if n.endswith(BESIDE))) if name]
        theirs = [(name, samples[peer_case(case), name]) for name in shown if (peer_case(case), name) in samples]
        for index, (name, results) in enumerate(theirs or [("", [])]):
            label = labels[name] + (" (prefix caching on)" if name.endswith(BESIDE) else "") if name else ""
            goal = case.goal if index == 0 else None
            rows = rows_of(case, mine, results, label, gpu_ms.get(case.gpu_key), goal)
            report.rows += [row for row in rows if row.metric in MAIN_METRICS] if index else rows
    report.details["repeats"] = {
        f"{case}: {name}": [_summary(result) for result in results] for (case, name), results in samples.items()
    }


def with_tcp(cases: list[Case], samples: Samples) -> list[Case]:
    names = {case for case, _ in samples}
    ids = [case for case in cases if case.form == "ids" and tcp_name(case) != case.name]
    return [*cases, *(structs.replace(case, name=tcp_name(case), goal=None) for case in ids if tcp_name(case) in names)]


def peer_case(case: Case) -> str:
    """The peer's case that a case of ours stands against: over tcp, its token ids."""
    return case.name.replace(TCP, "ids")


def rows_of(
    case: Case, mine: list[LoadResult], theirs: list[LoadResult], label: str, gpu: float | None, goal: float | None
) -> list[Row]:
    rows = []
    for metric, value in figures(case, mine).items():
        if theirs:
            row = compare(case.table, case.name, metric, value, figures(case, theirs)[metric], label)
        else:
            row = Row(case.table, case.name, metric, round(value, 4))
        if metric in MAIN_METRICS:
            row.goal = f">= {goal}x" if goal and theirs else None
            row.gpu_ms = round(gpu, 4) if gpu is not None else None
        if metric == "p99_ms":
            row.goal = f"<= {MAX_TAIL} x p50"
        rows.append(row)
    return rows


def figures(case: Case, results: list[LoadResult]) -> dict[str, float]:
    if case.is_rate:
        return {"embeddings_per_s": rate(case, results)}
    latencies = pooled(results)
    return {metric: percentile(latencies, percent) for metric, percent in PERCENTILES}


def _summary(result: LoadResult) -> dict[str, Any]:
    found: dict[str, Any] = {"n": len(result.latencies_ms), "seconds": round(result.seconds, 3)}
    found |= {metric: round(result.percentile_ms(percent), 3) for metric, percent in PERCENTILES}
    return found | result.headers_ms


def read_gpu_ms(path: Path | None) -> dict[str, float]:
    """What bench.gpu_time wrote; nothing without a file."""
    return {} if path is None or not path.exists() else json.loads(path.read_text())["ms"]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
