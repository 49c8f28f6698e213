"""What the planner of generation counts, as Prometheus samples."""

import numpy as np
from numpy.typing import NDArray

from ipc.histogram import Histogram

_FIRST_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Figures:
    """Counters since the start of this process, and gauges that the planner keeps up to date."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0  # of prompts whose first token came
        self.num_prefix_hit_tokens = 0
        self.num_prefilled_tokens = 0  # computed, replays of preempted and lost sequences included
        self.num_generated_tokens = 0
        self.num_drafts = 0  # rows with drafts that were verified
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_at: list[int] = []  # drafts accepted at their first, second, ... place
        self.num_preemptions = 0
        self.running_sequences = 0
        self.waiting_sequences = 0
        self.blocks = 0
        self.blocks_used = 0
        self.blocks_cached = 0
        self.first_token_seconds = Histogram(_FIRST_BOUNDS)
        self.inter_token_seconds = Histogram(_BETWEEN_BOUNDS)

    def count_drafts(self, drafts: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Of a step's rows: drafts verified, and how many of them were accepted; [R] each."""
        self.num_drafts += int(np.count_nonzero(drafts))
        self.num_draft_tokens += int(drafts.sum())
        self.num_accepted_tokens += int(accepted.sum())
        most = int(drafts.max())
        self.num_accepted_at += [0] * (most - len(self.num_accepted_at))
        for place in range(most):
            self.num_accepted_at[place] += int(np.count_nonzero(accepted > place))

    def samples(self, prefix: str, labels: str) -> dict[str, float]:
        totals = {
            "prompt_tokens": self.num_prompt_tokens,
            "prefix_hit_tokens": self.num_prefix_hit_tokens,
            "prefilled_tokens": self.num_prefilled_tokens,
            "generated_tokens": self.num_generated_tokens,
            "drafts": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "preemptions": self.num_preemptions,
        }
        gauges: dict[str, float] = {
            "running_sequences": self.running_sequences,
            "waiting_sequences": self.waiting_sequences,
            "blocks": self.blocks,
            "blocks_used": self.blocks_used,
            "blocks_cached": self.blocks_cached,
        }
        if self.num_drafts:  # accepted drafts and the token after them
            gauges["mean_accepted_length"] = 1 + self.num_accepted_tokens / self.num_drafts
        values = {f"{prefix}{name}_total{{{labels}}}": float(value) for name, value in totals.items()}
        values |= {f"{prefix}{name}{{{labels}}}": float(value) for name, value in gauges.items()}
        for place, count in enumerate(self.num_accepted_at):
            values[f'{prefix}accepted_tokens_at_total{{{labels},place="{place}"}}'] = float(count)
        values |= self.first_token_seconds.samples(f"{prefix}time_to_first_token_seconds", labels)
        values |= self.inter_token_seconds.samples(f"{prefix}inter_token_seconds", labels)
        return values


def observe_all(histogram: Histogram, values: NDArray[np.float64]) -> None:
    """Histogram.observe of each of `values`."""
    found = np.bincount(np.searchsorted(histogram.bounds, values), minlength=len(histogram.counts))
    histogram.counts = [count + more for count, more in zip(histogram.counts, found.tolist(), strict=True)]
    histogram.sum += float(values.sum())
