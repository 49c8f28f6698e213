"""Whole greedy generations of many sequences at once, against what transformers put out for each alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.step import KIND_PREFILL
from ipc.types import SamplingParams
from tests.goldens import NUM_TOKENS, GoldenPrompt, read_goldens
from tests.rose.decoder_driving import Driver, Row, Seq
from tests.rose.tiny_lm import write_llama, write_qwen3

LOGPROBS = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True)


def check_goldens(directory: Path, prompts: list[GoldenPrompt], **settings: Any) -> None:
    """Prompts enter one by one, in chunks, while those before them decode; then all go on together."""
    driver = Driver(directory, max_num_seqs=len(prompts), **settings)
    seqs = [Seq(list(prompt.prompt_ids), LOGPROBS) for prompt in prompts]
    logprobs: dict[int, list[float]] = {seq: [] for seq in range(len(seqs))}
    decoding: list[int] = []

    def step(*prefill: Row, **plan: Any) -> None:
        rows = [*prefill, *(Row(seqs[i]) for i in decoding if len(seqs[i].tokens) < ends[i])]
        arrays = driver.run(rows, **plan)
        for line, row in enumerate(rows):
            logprobs[seqs.index(row.seq)] += arrays["logprobs"][line, : arrays["num_tokens"][line]].tolist()

    ends = [len(prompt.prompt_ids) + NUM_TOKENS for prompt in prompts]
    for index, seq in enumerate(seqs):
        length = len(seq.tokens)
        for begin in range(0, length, 40):
            chunk = min(40, length - begin)
            step(Row(seq, chunk, KIND_PREFILL), **({"admit": [seq]} if begin == 0 else {}))
        decoding.append(index)
    while any(len(seq.tokens) < end for seq, end in zip(seqs, ends, strict=True)):
        step()
    driver.close()
    for index, prompt in enumerate(prompts):
        tokens = seqs[index].tokens[len(prompt.prompt_ids) :]
        prompt.check(tokens)
        if tokens == prompt.tokens:
            np.testing.assert_allclose(logprobs[index], prompt.logprobs, atol=1e-3)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3"])
def test_tiny(tmp_path: Path, name: Any) -> None:
    write = {"tiny_llama": write_llama, "tiny_qwen3": write_qwen3}[name]
    check_goldens(write(tmp_path), read_goldens(name))


def test_smollm2(smollm2_dir: Path) -> None:
    """The real default model, on two threads."""
    check_goldens(smollm2_dir, read_goldens("smollm2")[::2], num_threads=2, max_num_batched_tokens=128)
