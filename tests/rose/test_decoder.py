"""Whole generations driven step by step, against transformers computing every token anew from the whole text."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.rose.decoder_driving import Driver, Seq
from tests.rose.tiny_lm import write_llama, write_qwen3


class Model:
    """A tiny model in a directory, and what transformers says comes next."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reference = hf.AutoModelForCausalLM.from_pretrained(directory).eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self._reference(torch.tensor([tokens])).logits[0]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    write = {"llama": write_llama, "qwen3": write_qwen3}[request.param]
    return Model(write(tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def driver(model: Model) -> Iterator[Driver]:
    driver = Driver(model.directory)
    yield driver
    driver.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunk", [64, 16, 7, 1])
def test_alone(model: Model, driver: Driver, chunk: int) -> None:
    seq = Seq(prompt(37))
    driver.prefill(seq, chunk)
    driver.decode([seq], 19)
    assert seq.tokens == model.greedy(prompt(37), 20)
