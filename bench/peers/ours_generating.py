"""Our own stack with one language model, over HTTP, as `bouquet up` starts it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from bench.load import LoadResult
from bench.peers import GeneratingSetup
from bench.stack import real_stack
from bench.streams import complete, stream_prompts

SPIN_US = 500  # on a GPU: a rank that spins needs a core of its own


class OursGenerating:
    name = "ours"
    label = "bouquet"

    @contextmanager
    def launch(self, setup: GeneratingSetup) -> Iterator[None]:
        overrides = [
            f"rank.device={setup.device}",
            "models[0].rank.task=generate",
            f"models[0].memory_fraction={setup.memory_fraction}",
            f"rank.max_model_len={setup.max_model_len}",
        ]
        if setup.device != "cpu" and len(os.sched_getaffinity(0)) >= 8:
            overrides.append(f"rank.spin_us={SPIN_US}")
        with real_stack(overrides, (setup.model, setup.model_dir)) as stack:
            self._url, self._model = stack.url, setup.model
            yield

    def generate(self, prompts: list[list[int]], num_tokens: int, in_flight: int, num_warmup: int) -> LoadResult:
        return stream_prompts(self._url, self._model, prompts, num_tokens, in_flight, num_warmup)

    def complete(self, prompt: list[int], num_tokens: int) -> str:
        return complete(self._url, self._model, prompt, num_tokens)
