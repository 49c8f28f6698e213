"""Rolling restart, scaling and the command line on a running stack, with a tiny real model."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import BertConfig, BertModel

from tests.integration.load import Load
from tests.integration.stack import Stack

MODEL = "tiny"


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory, minilm_dir: Path) -> Path:
    """A random BERT of two layers with the default model's tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
    BertModel(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((minilm_dir / name).read_bytes())
    return path


@pytest.fixture
def stack(run_dir: Path, tiny_dir: Path) -> Iterator[Stack]:
    with Stack(run_dir, {MODEL: tiny_dir}, num_gateways=2, replicas=2) as made:
        yield made


class Golden:
    """Rows and the vectors the stack gave for each alone, before anything happened to it."""

    def __init__(self, stack: Stack) -> None:
        generator = random.Random(1)
        self.rows = [[generator.randrange(1000, 30000) for _ in range(generator.randint(1, 30))] for _ in range(40)]
        self._vectors = {
            tuple(row): vector for row, vector in zip(self.rows, stack.embed(MODEL, self.rows), strict=True)
        }

    def expected(self, row: list[int]) -> NDArray[np.float32]:
        return self._vectors[tuple(row)]

    def load(self, stack: Stack) -> Load:
        return Load(stack.url, MODEL, self.expected, rows=self.rows, num_workers=4, pause=0.02)


async def test_rolling_restart_of_everything_without_an_error(stack: Stack) -> None:
    golden = Golden(stack)
    pids = {name: info.pid for name, info in stack.processes().items()}
    async with golden.load(stack) as running:
        await running.answered(20)
        done = await asyncio.to_thread(stack.cli, "restart")
        assert done.returncode == 0, done.stderr
        await running.answered(20)
    assert running.outcome.num_wrong == 0
    assert running.outcome.num_failed == 0, running.outcome
    after = {name: info.pid for name, info in stack.processes().items()}
    assert after.keys() == pids.keys()
    assert not set(after.values()) & set(pids.values())


async def test_scale_down_and_up_without_an_error(stack: Stack) -> None:
    golden = Golden(stack)
    async with golden.load(stack) as running:
        await running.answered(20)
        down = await asyncio.to_thread(stack.cli, "scale", f"{MODEL}=1")
        assert down.returncode == 0, down.stderr
        assert len(stack.processes()) == 4
        await running.answered(20)
        up = await asyncio.to_thread(stack.cli, "scale", f"{MODEL}=2")
        assert up.returncode == 0, up.stderr
        assert len(stack.processes()) == 6
        await running.answered(20)
    assert running.outcome.num_wrong == 0
    assert running.outcome.num_failed == 0, running.outcome
    status = stack.cli("status")
    assert status.returncode == 0, status.stdout
    assert status.stdout.count(f"{MODEL}-1") >= 2
