"""The planner over a real model on CPU: company, cache and preemption change no token of anybody."""

import random
from collections.abc import Iterator

import pytest

from ipc.types import SamplingParams
from rose.config import RankConfig
from rose.decoder_loader import DecoderLoader
from rose.model_runner import ModelRunner
from tests.rose.speculation.replica import Jobs, Replica
from tests.rose.tiny_lm import write_llama


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    directory = write_llama(tmp_path_factory.mktemp("model"), tokenizer=True)
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 112}
    config = RankConfig(device="cpu", dtype="float32", num_threads=1, kv_cache_bytes=200_000, **limits)
    made = ModelRunner(DecoderLoader("tiny", directory, config))
    made.load()
    yield made
    made.close()


def test_company_cache_and_preemption_change_no_token(runner: ModelRunner) -> None:
    draw = random.Random(3)
    base = [draw.randrange(5, runner.facts.vocab_size) for _ in range(60)]
    jobs: Jobs = []
    for seed in range(8):
        prompt = base[: draw.randrange(1, 40)] + [draw.randrange(5, runner.facts.vocab_size)]
        params = SamplingParams(
            max_tokens=draw.randrange(40, 70), temperature=seed % 2, seed=seed, frequency_penalty=0.5 * (seed % 3)
        )
        jobs.append((prompt, params))
    replica = Replica(runner)
    together = replica.run(jobs, random.Random(1))
    for job, answer in zip(jobs, together, strict=True):
        assert Replica(runner).run([job], random.Random(1))[0].tokens == answer.tokens
    assert replica.figures.num_preemptions > 0
    assert replica.figures.num_prefix_hit_tokens > 0
