"""The real default model drafting for itself: the tokens are those that transformers gives without drafts."""

import random
from pathlib import Path

from ipc.types import SamplingParams
from rose.config import RankConfig, SpeculationConfig
from rose.decoder_loader import DecoderLoader
from rose.model_runner import ModelRunner
from tests.goldens import NUM_TOKENS, read_goldens
from tests.rose.speculation.replica import Replica


def test_n_grams(smollm2_dir: Path) -> None:
    speculation = SpeculationConfig(proposer="n_gram", num_draft_tokens=3)
    runner = ModelRunner(
        DecoderLoader("smollm2", smollm2_dir, RankConfig(device="cpu", num_threads=2, speculation=speculation))
    )
    runner.load()
    prompts = read_goldens("smollm2")[::2]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    replica = Replica(runner)
    answers = replica.run([(prompt.prompt_ids, params) for prompt in prompts], random.Random(2))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == NUM_TOKENS
        prompt.check(answer.tokens)
    assert replica.figures.num_accepted_tokens > 0
    runner.close()
