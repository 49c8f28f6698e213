"""Our own rank in this process, the real planner before it: no sockets, no text. What transformers is compared with."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer

from bench.decode_loop import DecodeLoop
from bench.load import LoadResult
from bench.peers import GeneratingSetup
from bench.peers.batches import in_batches
from bench.ranks import RankSpec, ranks
from rose.config import RankConfig


class OursInProcess:
    name = "ours-in-process"
    label = "bouquet's rank in the benchmark's process"

    @contextmanager
    def launch(self, setup: GeneratingSetup) -> Iterator[None]:
        self._tokenizer = Tokenizer.from_file(str(setup.model_dir / "tokenizer.json"))
        config = RankConfig(
            device=setup.device,
            num_threads=setup.num_threads,
            max_model_len=setup.max_model_len,
            memory_fraction=setup.memory_fraction,
        )
        with ranks(RankSpec(setup.model_dir, config)) as self._ranks:
            yield

    def generate(self, prompts: list[list[int]], num_tokens: int, in_flight: int, num_warmup: int) -> LoadResult:
        if num_warmup:
            self._batch(prompts[:num_warmup], num_tokens)
        return in_batches(prompts[num_warmup:], in_flight, lambda batch: self._times_ms(batch, num_tokens))

    def complete(self, prompt: list[int], num_tokens: int) -> str:
        said = self._batch([prompt], num_tokens).said[0]
        return str(self._tokenizer.decode([token for delta in said for token in delta.tokens]))

    def _times_ms(self, prompts: list[list[int]], num_tokens: int) -> list[list[float]]:
        began = time.perf_counter()
        said_at = self._batch(prompts, num_tokens).said_at
        return [[(at - began) * 1e3 for at in said_at[index]] for index in range(len(prompts))]

    def _batch(self, prompts: list[list[int]], num_tokens: int) -> DecodeLoop:
        loop = DecodeLoop(self._ranks, prompts, max_tokens=num_tokens)
        loop.to_end()
        loop.close()
        return loop
