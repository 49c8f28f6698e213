"""Two GPUs over NCCL, collectives inside the graphs, against one rank on CPU in float32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ipc.types import SamplingParams
from tests.rose.decoder_driving import Driver, Seq
from tests.rose.distributed.ranks import SIZE, Ranks
from tests.rose.driving import Driver as EncoderDriver
from tests.rose.driving import ragged_ids
from tests.rose.random_models import bert
from tests.rose.tiny_lm import VOCAB_SIZE, write_llama, write_qwen3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason="needs two GPUs"),
]
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": 1 << 22, "dtype": "float32"}


@pytest.fixture
def gpus() -> Iterator[Ranks]:
    made = Ranks(gpus=True)
    yield made
    made.close()


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


@pytest.mark.parametrize("write", [write_llama, write_qwen3])
def test_tokens_are_those_of_one_rank_and_differences_are_found(gpus: Ranks, tmp_path: Path, write) -> None:
    directory = write(tmp_path)
    one = Driver(directory, **SETTINGS)
    runner = gpus.load(directory, **SETTINGS, device="cuda", capture="lazy")
    two = Driver(directory, runner=runner, rings=runner.slots)
    found = []
    for driver in (one, two):
        seqs = [Seq(prompt(9, 0)), Seq(prompt(30, 1)), Seq(prompt(5, 2), SamplingParams(seed=4, temperature=0.7))]
        for seq in seqs:
            driver.prefill(seq, 16)
        driver.decode(seqs, 24)
        found.append([seq.tokens for seq in seqs])
    assert found[1] == found[0]
    for figures in gpus.call("figures"):
        assert figures["graph_replays_total"] > 20
    gpus.tell(1, "forget_token", seqs[0].slot)
    with pytest.raises(AssertionError, match="Diverged"):
        two.decode(seqs[:1], 1)


def test_vectors_are_those_of_one_rank(gpus: Ranks, tmp_path: Path) -> None:
    directory = bert(tmp_path)
    rows = ragged_ids(4096, (1, 17, 100))
    one = EncoderDriver(directory, dtype="float32")
    runner = gpus.load(directory, device="cuda", dtype="float32", capture="lazy", max_num_batched_tokens=512)
    two = EncoderDriver(directory, runner=runner, slots=runner.slots)
    expected = one.vectors(rows)
    for _ in range(3):  # eager, captured, replayed
        np.testing.assert_allclose(two.vectors(rows), expected, atol=1e-4)
