"""What a request costs beside the model: a real gateway and scheduler around a rank that computes nothing.

    python -m bench.micro.overhead

A 16-token embedding request, as token ids and as text: latency at one request in flight, requests/s at 32 from a
raw-socket client in a process of its own, and where the time goes. Writes a result file; its path is the last line.
"""

import argparse
import os
import re
import sys
import timeit
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from bench import report
from bench.client import Address, Connection, encode_request
from bench.load import LoadError, LoadResult, LoadSpec, median, run_one
from bench.report import Row
from bench.stack import RunningStack, StackFailed, default_model, end_in_order_when_told, fake_rank_stack
from bench.workloads import load_tokenizer, texts_of
from gateway.dialects.openai import parse_embeddings, render_embeddings
from gateway.tasks import EmbedOutcome, Rows
from ipc.types import Timings

PATH = "/v1/embeddings"
NUM_TOKENS = 16
NUM_BODIES = 50
GOAL_P50_MS, GOAL_REQUESTS_PER_S = 0.9, 4000
SOURCES = ("token ids", "text")


class Measured(Struct):
    """Both loads of one repeat, and what the server's own counters say of them."""

    alone: LoadResult
    crowd: LoadResult
    gateway_ms: float  # request's head to answer, at one in flight
    cpu_ms: dict[str, float]  # per request of the crowd, by process


def bodies(model: str, directory: Path) -> dict[str, list[str]]:
    """JSON bodies by source: the same real texts as ids and as text."""
    tokenizer = load_tokenizer(directory)
    texts = texts_of(tokenizer, NUM_TOKENS, NUM_BODIES)
    ids = [tokenizer.encode(text).ids for text in texts]

    def body(content: object) -> str:
        return msgspec.json.encode({"model": model, "input": content, "encoding_format": "base64"}).decode()

    return {"token ids": [body(each) for each in ids], "text": [body(each) for each in texts]}


def measure(stack: RunningStack, source_bodies: list[str], scale: float) -> Measured:
    common = {"url": stack.url, "path": PATH, "bodies": source_bodies}
    before = gateway_time(stack.url)
    alone = run_one(LoadSpec(**common, num_requests=int(3000 * scale), max_seconds=10, num_warmup=100))  # type: ignore[arg-type]
    after = gateway_time(stack.url)
    cpu_before = cpu_ms(stack)
    crowd_spec = LoadSpec(**common, concurrency=32, num_requests=int(20_000 * scale), max_seconds=10, num_warmup=0)  # type: ignore[arg-type]
    crowd = run_one(crowd_spec)
    spent = {name: value - cpu_before[name] for name, value in cpu_ms(stack).items()}
    return Measured(
        alone=alone,
        crowd=crowd,
        gateway_ms=(after[0] - before[0]) / (after[1] - before[1]) * 1000,
        cpu_ms={name: value / len(crowd.latencies_ms) for name, value in spent.items()},
    )


def gateway_time(url: str) -> tuple[float, float]:
    """Sum of seconds and number of requests, from /metrics."""
    address = Address.of(url)
    with Connection(address) as connection:
        page = connection.request(encode_request(address, "/metrics", b"")).body.decode()
    found = dict(re.findall(r"^bouquet_http_request_seconds_(sum|count)\{[^}]*\} (\S+)$", page, re.M))
    return float(found["sum"]), float(found["count"])


def cpu_ms(stack: RunningStack) -> dict[str, float]:
    """Processor time of each process so far, all threads."""
    tick_ms = 1000 / os.sysconf("SC_CLK_TCK")
    fields = {
        name: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for name, pid in stack.pids.items()
    }
    return {name: (int(values[11]) + int(values[12])) * tick_ms for name, values in fields.items()}


def pure_parts_ms(body: str) -> dict[str, float]:
    """Parsing and rendering, which are functions without a clock in them, timed here."""
    data = body.encode()
    task = parse_embeddings(data)
    vector = np.random.default_rng(1).standard_normal(384, np.float32).tobytes()
    outcome = EmbedOutcome(Rows([vector], len(vector), Timings(0.0, 0.0)), NUM_TOKENS)
    return {
        "parse": min(timeit.repeat(lambda: parse_embeddings(data), number=1000, repeat=5)),
        "render": min(timeit.repeat(lambda: render_embeddings(task, outcome), number=1000, repeat=5)),
    }


def parts(found: list[Measured], body: str) -> Iterator[tuple[str, float]]:
    """Where the mean time at one request in flight goes, milliseconds; the parts sum up to the whole."""
    total = median([sum(each.alone.latencies_ms) / len(each.alone.latencies_ms) for each in found])
    gateway = median([each.gateway_ms for each in found])
    headers = {
        name: median([each.alone.headers_ms[f"x-{name}-ms"] for each in found])
        for name in ("tokenize", "queue", "compute")
    }
    pure = pure_parts_ms(body)
    yield "client, kernel and HTTP (aiohttp)", total - gateway
    yield "parse", pure["parse"]
    yield "tokenise and check", headers["tokenize"]
    yield "gateway's own, hops to the scheduler and back", gateway - sum(pure.values()) - sum(headers.values())
    yield "plan", headers["queue"]
    yield "hops to the rank and back, fake step", headers["compute"]
    yield "render", pure["render"]
    yield "sum (mean)", total


def rows(source: str, found: list[Measured], body: str) -> list[Row]:
    p50 = median([each.alone.percentile_ms(50) for each in found])
    rate = median([each.crowd.requests_per_s for each in found])
    result = [
        Row(source, "1 in flight", "p50_ms", p50, goal=f"<= {GOAL_P50_MS}"),
        Row(source, "1 in flight", "p99_ms", median([each.alone.percentile_ms(99) for each in found])),
        Row(source, "32 in flight", "requests_per_s", rate, goal=f">= {GOAL_REQUESTS_PER_S}"),
        Row(source, "32 in flight", "p50_ms", median([each.crowd.percentile_ms(50) for each in found])),
        Row(source, "32 in flight", "p99_ms", median([each.crowd.percentile_ms(99) for each in found])),
    ]
    result += [Row(source, f"1 in flight: {name}", "mean_ms", value) for name, value in parts(found, body)]
    for name in found[0].cpu_ms:
        value = median([each.cpu_ms[name] for each in found])
        result.append(Row(source, f"32 in flight: CPU of the {name}", "cpu_ms", value))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.overhead", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small run to see that everything works; no figures")
    parser.add_argument("--hardware", default="cpu", help="short name of the machine, part of the file's name")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where the files go")
    args = parser.parse_args()
    end_in_order_when_told()
    into = report.new_report("overhead-quick" if args.quick else "overhead", args.hardware)
    name, directory = default_model()
    by_source = bodies(name, directory)
    found: dict[str, list[Measured]] = {source: [] for source in SOURCES}
    try:
        with fake_rank_stack() as stack:
            for repeat in range(1 if args.quick else args.repeats):
                for source in SOURCES:
                    print(f"repeat {repeat + 1}: {source}", file=sys.stderr, flush=True)
                    found[source].append(measure(stack, by_source[source], 0.1 if args.quick else 1.0))
    except (StackFailed, LoadError) as error:
        sys.exit(f"bench: {error}")
    for source in SOURCES:
        into.rows += rows(source, found[source], by_source[source][0])
        into.details[source] = {
            "p50_ms": [each.alone.percentile_ms(50) for each in found[source]],
            "requests_per_s": [round(each.crowd.requests_per_s, 1) for each in found[source]],
        }
    into.notes.append("one gateway, one scheduler, one fake rank and the client's process share the machine's cores")
    into.notes.append(
        "medians over repeats; parse and render are timed apart, the remainder is called the gateway's own"
    )
    path = report.write(into, args.results)
    print("\n".join(report.table_lines(into.rows)))
    print(path)


if __name__ == "__main__":
    main()
