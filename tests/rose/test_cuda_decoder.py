"""The GPU's way through generation, in Triton's interpreter where there is no GPU, against the CPU's way."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.types import SamplingParams
from rose.config import RankConfig
from rose.cuda_decoder import CudaDecoder
from rose.kv_cache import KVShape, allocate
from rose.models.load import load_model
from tests.rose.decoder_driving import GREEDY, Driver, Seq
from tests.rose.host_stream import HostStream
from tests.rose.tiny_lm import write_llama, write_qwen3

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {
    "max_num_seqs": 5, "max_num_batched_tokens": 48, "max_model_len": 80, "kv_cache_bytes": 1 << 20,
}  # fmt: skip


class StaticDriver(Driver):
    """A Driver whose runner goes the GPU's way."""

    def __init__(self, directory: Path, *, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        super().__init__(directory, **SIZES | settings)
        runner = self.runner
        model = load_model(directory, runner._model_config, runner._task, DEVICE, dtype)
        shape = KVShape.of(runner._model_config, dtype)
        self.stream = HostStream()
        self.decoder = CudaDecoder(
            model,
            allocate(shape, self.facts.num_blocks, DEVICE),
            runner._model_config,
            self.facts,
            RankConfig(**{"capture": "lazy"} | SIZES | settings),
            device=DEVICE,
            stream=self.stream,
            shapes=directory / "shapes.json",
        )
        runner.close()
        runner._decoder = self.decoder


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = {"llama": write_llama, "qwen3": write_qwen3}[request.param]
    return write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(driver: Driver, lengths: list[int], num_tokens: int, params: SamplingParams = GREEDY) -> list[list[int]]:
    seqs = [Seq(prompt(length, seed), params) for seed, length in enumerate(lengths)]
    for seq in seqs:
        driver.prefill(seq, chunk=16)
    driver.decode(seqs, num_tokens)
    return [seq.tokens for seq in seqs]


def test_greedy_tokens_are_the_cpus(directory: Path) -> None:
    """Chunked prompts, then first sight, capture and replays of two batch sizes; blocks fill up on the way."""
    lengths = [37, 14, 3]
    cpu, gpu = Driver(directory, **SIZES), StaticDriver(directory)
    expected, got = generate(cpu, lengths, 6), generate(gpu, lengths, 6)
    cpu.close()
    assert got == expected
    figures = gpu.decoder.figures()
    assert (figures["graph_captures_total"], figures["graph_replays_total"]) == (1, 5)
