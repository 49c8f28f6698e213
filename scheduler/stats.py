"""What a scheduler counts, as Prometheus samples. Plain numbers: whoever does the work counts it."""

from collections import Counter

from ipc.control import ProcessStats
from ipc.histogram import Histogram
from scheduler.llm.figures import Figures

_TOKEN_BOUNDS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_SECONDS_BOUNDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Stats:
    """Counters since the start of this process, and a few gauges that their owners keep up to date."""

    def __init__(self, replica: str) -> None:
        escaped = replica.replace("\\", r"\\").replace('"', r"\"")
        self._labels = f'replica="{escaped}"'
        self._process = f"scheduler/{replica}"
        self.requests: Counter[str] = Counter()  # outcome → terminal messages
        self.step_failures: Counter[str] = Counter()  # kind
        self.stale: Counter[str] = Counter()  # link → messages dropped: other epoch, unknown step, not decodable
        self.num_rows = 0
        self.num_tokens = 0
        self.num_steps = 0
        self.num_canaries = 0
        self.num_bad_canaries = 0
        self.num_deaths = 0
        self.num_requeued_rows = 0
        self.num_quarantined = 0
        self.num_undeliverable = 0
        self.num_epochs = 0
        self.batch_tokens = Histogram(_TOKEN_BOUNDS)
        self.queue_seconds = Histogram(_SECONDS_BOUNDS)
        self.step_seconds = Histogram(_SECONDS_BOUNDS)
        self.pending_requests = 0
        self.pending_tokens = 0
        self.steps_in_flight = 0
        self.generation: Figures | None = None  # of a language model
        self.last_forward: float | None = None  # when a row last came out right, monotonic seconds

    def forward_age_ms(self, now: float) -> int:
        """Since a step last finished with a good row; -1 before the first."""
        return -1 if self.last_forward is None else int((now - self.last_forward) * 1000)

    def samples(self, incarnation: int, now: float) -> ProcessStats:
        labels, prefix = self._labels, "bouquet_scheduler_"
        totals = {
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "steps": self.num_steps,
            "canary_steps": self.num_canaries,
            "bad_canary_steps": self.num_bad_canaries,
            "rank_deaths": self.num_deaths,
            "requeued_rows": self.num_requeued_rows,
            "quarantined_rows": self.num_quarantined,
            "undeliverable_replies": self.num_undeliverable,
            "epochs": self.num_epochs,
        }
        gauges = {
            "pending_requests": self.pending_requests,
            "pending_tokens": self.pending_tokens,
            "steps_in_flight": self.steps_in_flight,
            "forward_age_ms": self.forward_age_ms(now),
        }
        values = {f"{prefix}{name}_total{{{labels}}}": float(value) for name, value in totals.items()}
        values |= {f"{prefix}{name}{{{labels}}}": float(value) for name, value in gauges.items()}
        for name, label, counter in (
            ("requests", "outcome", self.requests),
            ("step_failures", "kind", self.step_failures),
            ("stale_messages", "link", self.stale),
        ):
            for key, count in counter.items():
                values[f'{prefix}{name}_total{{{labels},{label}="{key}"}}'] = float(count)
        values |= self.batch_tokens.samples(f"{prefix}batch_tokens", labels)
        values |= self.queue_seconds.samples(f"{prefix}queue_seconds", labels)
        values |= self.step_seconds.samples(f"{prefix}step_seconds", labels)
        if self.generation is not None:
            values |= self.generation.samples(prefix, labels)
        return ProcessStats(self._process, incarnation, values)
