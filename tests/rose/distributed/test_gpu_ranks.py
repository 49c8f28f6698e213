"""Two GPUs over NCCL and shared memory, collectives inside the graphs, against one rank on CPU in float32."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ipc.types import SamplingParams
from rose.distributed.shared_sums import MEASURED, way
from tests.rose.decoder_driving import Driver, Seq
from tests.rose.distributed.ranks import SHARED_SUMS, SIZE, Ranks
from tests.rose.driving import Driver as EncoderDriver
from tests.rose.driving import ragged_ids
from tests.rose.random_models import bert, qwen3
from tests.rose.tiny_lm import VOCAB_SIZE, write_llama, write_qwen3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason="needs two GPUs"),
]
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": 1 << 22, "dtype": "float32"}
NUM_REPLAYS = 20
LIMITS = MEASURED[SIZE]


@pytest.fixture
def grouped(gpus: Ranks) -> Ranks:
    gpus.group()
    return gpus


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def numbers(num_bytes: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each rank; whole and small, so that every sum is exact."""
    torch.manual_seed(num_bytes)
    shape = (4, num_bytes // dtype.itemsize // 4)
    return [torch.randint(-4, 5, shape).to(dtype) for _ in range(SIZE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_bytes", [64, 4096, LIMITS.one_shot, LIMITS.two_shot, 2 * LIMITS.two_shot])
def test_sums_of_two_gpus_alone_and_in_a_graph(grouped: Ranks, num_bytes: int, dtype: torch.dtype) -> None:
    values = numbers(num_bytes, dtype)
    for found in grouped.call("collective", "all_reduce", values):
        torch.testing.assert_close(found, values[0] + values[1], rtol=0, atol=0)
    shared = SHARED_SUMS and way(num_bytes, dtype, LIMITS) is not None
    for has_room, found in grouped.call("captured", "all_reduce", values, NUM_REPLAYS):
        assert has_room == shared, "a rank could not map the other's memory: see its warning"
        for number, each in enumerate(found, 1):
            torch.testing.assert_close(each, number * (values[0] + values[1]), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_parts_and_the_leaders_word_in_a_graph(grouped: Ranks, dtype: torch.dtype) -> None:
    values = numbers(4096, dtype)
    for _, found in grouped.call("captured", "all_gather", values, 3):
        for number, each in enumerate(found, 1):
            torch.testing.assert_close(each, number * torch.stack(values), rtol=0, atol=0)
    for _, found in grouped.call("captured", "broadcast", values, 3):
        for number, each in enumerate(found, 1):
            torch.testing.assert_close(each, number * values[0], rtol=0, atol=0)


@pytest.mark.parametrize("write", [write_llama, write_qwen3])
def test_tokens_are_those_of_one_rank_and_differences_are_found(
    gpus: Ranks, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
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


@pytest.mark.parametrize("write", [bert, qwen3])
def test_vectors_are_those_of_one_rank(gpus: Ranks, tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """Exact without graphs, which float32 has no attention for; with graphs as near as bfloat16 can be."""
    directory = write(tmp_path)
    rows = ragged_ids(4096, (1, 17, 100))
    sizes = {"max_num_batched_tokens": 512, "max_model_len": 512, "max_graph_tokens": 512}
    one = EncoderDriver(directory, dtype="float32", **sizes)
    expected = one.vectors(rows)
    for dtype in ("float32", "bfloat16"):
        runner = gpus.load(directory, device="cuda", dtype=dtype, capture="lazy", **sizes)
        two = EncoderDriver(directory, runner=runner, slots=runner.slots)
        for _ in range(3):  # eager, captured, replayed
            vectors = two.vectors(rows)
            if dtype == "float32":
                np.testing.assert_allclose(vectors, expected, atol=1e-4)
            lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
            assert ((vectors * expected).sum(1) / lengths > 0.999).all()
        for figures in gpus.call("figures"):
            assert (figures["graph_replays_total"] > 0) == (dtype == "bfloat16")
