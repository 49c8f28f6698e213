"""Drafts on the GPU's way, in Triton's interpreter: no token changes, and steps are graphs."""

from pathlib import Path

import pytest
import torch

from rose.config import RankConfig, SpeculationConfig
from rose.cuda_decoder_load import load_cuda_decoder
from rose.decoder_loader import DecoderLoader
from rose.model_runner import Loaded, ModelRunner
from rose.models.load import load_model
from tests.rose.host_stream import HostStream
from tests.rose.speculation.matrix import LIMITS, Matrix
from tests.rose.tiny_lm import write_llama

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter and a stream on the host")

CPU = torch.device("cpu")
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(write_llama(tmp_path_factory.mktemp("llama"), tokenizer=True))


def static_runner(directory: Path, speculation: SpeculationConfig, blocks: int = 80) -> ModelRunner:
    config = RankConfig(
        device="cpu",
        dtype="float32",
        kv_cache_bytes=blocks * BLOCK_BYTES,
        capture="lazy",
        max_graph_tokens=0,
        speculation=speculation,
        **LIMITS,
    )
    runner = ModelRunner(DecoderLoader("tiny", directory, config))
    loader = runner.loader
    model = load_model(directory, loader._model_config, loader._task, CPU, torch.float32)
    decoder, loader.facts = load_cuda_decoder(
        model,
        loader._model_config,
        loader.facts,
        config,
        device=CPU,
        dtype=torch.float32,
        tokenizer=directory / "tokenizer.json",
        shapes=None,
        stream=HostStream(),
    )
    runner.facts = loader.facts
    runner.use(Loaded(decoder, decoder.generate))
    return runner


@pytest.mark.long
def test_ngram(matrix: Matrix) -> None:
    runner = static_runner(matrix.directory, SpeculationConfig(proposer="n_gram", num_draft_tokens=3))
    replica = matrix.check_together(runner)
    print(replica.figures.num_accepted_tokens, replica.num_steps, runner.device.figures())
