"""This gateway's counters, and the page that shows them with those of every other process.

`NAMES` is the one table of what a gateway measures. Values travel as ProcessStats: name → value, labels in the
name; histograms as their `_bucket`, `_sum` and `_count` samples.
"""

from collections.abc import Iterable

from ipc.control import ProcessStats
from ipc.histogram import Histogram

NAMES: dict[str, str] = {
    "bouquet_http_requests_total": "HTTP requests answered, by route and status",
    "bouquet_http_request_seconds": "Time from a request's head to its answer",
    "bouquet_http_requests_in_flight": "HTTP requests being worked on",
    "bouquet_tokenize_seconds": "Time to encode one request's texts",
    "bouquet_prompt_tokens_total": "Tokens sent to schedulers",
    "bouquet_chunks_in_flight": "Chunks sent and not answered yet",
    "bouquet_chunks_waiting": "Chunks that wait for a replica",
    "bouquet_failovers_total": "Chunks whose replica was lost while it worked on them",
    "bouquet_late_replies_total": "Replies to chunks no longer awaited, dropped",
    "bouquet_generations_total": "Generations that came to their end, by finish_reason",
    "bouquet_generated_tokens_total": "Tokens generated, as they came from schedulers",
    "bouquet_first_token_seconds": "Time from a request's encoded prompt to each choice's first token",
    "bouquet_inter_token_seconds": "Time between a choice's tokens; of several at once, an equal share each",
    "bouquet_rejected_total": "Chunks given back by schedulers, by code",
}
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

TOKEN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Metrics:
    """Plain counters; the event loop's thread is the only writer."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.in_flight = 0
        self.request_seconds = Histogram(BUCKETS_S)
        self.tokenize_seconds = Histogram(BUCKETS_S)
        self.first_token_seconds = Histogram(BUCKETS_S)
        self.inter_token_seconds = Histogram(TOKEN_BUCKETS_S)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.generations: dict[str, int] = {}
        self.chunks_in_flight = 0
        self.chunks_waiting = 0
        self.failovers = 0
        self.late_replies = 0
        self.rejected: dict[str, int] = {}

    def count_request(self, route: str, status: int, seconds: float) -> None:
        key = (route, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.request_seconds.observe(seconds)

    def count_rejected(self, code: str) -> None:
        self.rejected[code] = self.rejected.get(code, 0) + 1

    def count_generation(self, finish_reason: str) -> None:
        self.generations[finish_reason] = self.generations.get(finish_reason, 0) + 1

    def values(self) -> dict[str, float]:
        """All samples, as ProcessStats carries them."""
        samples: dict[str, float] = {
            "bouquet_http_requests_in_flight": self.in_flight,
            "bouquet_prompt_tokens_total": self.prompt_tokens,
            "bouquet_generated_tokens_total": self.generated_tokens,
            "bouquet_chunks_in_flight": self.chunks_in_flight,
            "bouquet_chunks_waiting": self.chunks_waiting,
            "bouquet_failovers_total": self.failovers,
            "bouquet_late_replies_total": self.late_replies,
        }
        for (route, status), count in self.requests.items():
            samples[f'bouquet_http_requests_total{{route="{route}",status="{status}"}}'] = count
        for code, count in self.rejected.items():
            samples[f'bouquet_rejected_total{{code="{code}"}}'] = count
        for reason, count in self.generations.items():
            samples[f'bouquet_generations_total{{finish_reason="{reason}"}}'] = count
        samples |= self.request_seconds.samples("bouquet_http_request_seconds")
        samples |= self.first_token_seconds.samples("bouquet_first_token_seconds")
        samples |= self.inter_token_seconds.samples("bouquet_inter_token_seconds")
        return samples | self.tokenize_seconds.samples("bouquet_tokenize_seconds")


def render(processes: Iterable[ProcessStats]) -> bytes:
    """Prometheus text of all processes' samples, each with a `process` label; of each process what comes last."""
    latest = {stats.process: stats for stats in processes}
    families: dict[str, list[str]] = {}
    for stats in latest.values():
        for sample, value in stats.values.items():
            name, brace, labels = sample.partition("{")
            inner = f",{labels[:-1]}" if brace and len(labels) > 1 else ""
            line = f'{name}{{process="{stats.process}"{inner}}} {value!r}'
            families.setdefault(_family(name), []).append(line)
    lines: list[str] = []
    for family, samples in sorted(families.items()):
        if family in NAMES:
            lines.append(f"# HELP {family} {NAMES[family]}")
        lines.append(f"# TYPE {family} {_type(family, samples)}")
        lines.extend(samples)
    return ("\n".join(lines) + "\n").encode()


def _family(name: str) -> str:
    for suffix in ("_bucket", "_sum", "_count"):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _type(family: str, samples: list[str]) -> str:
    if any(sample.startswith(f"{family}_bucket{{") for sample in samples):
        return "histogram"
    return "counter" if family.endswith("_total") else "gauge"
