"""Drafts of two ranks on GPUs, whole steps with them in graphs: the tokens are those of one rank on CPU without any."""

import random
from pathlib import Path

import pytest
import torch

from tests.rose.distributed.ranks import SIZE, Ranks
from tests.rose.distributed.test_drafts_of_ranks import configure
from tests.rose.speculation.matrix import LIMITS, Matrix
from tests.rose.speculation.replica import Replica
from tests.rose.tiny_lm import write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason="needs two GPUs"),
]

HEADS = ["mtp", "eagle", "mtp on the leader", "eagle on the leader, some tokens"]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(write_llama(tmp_path_factory.mktemp("target"), tokenizer=True))


@pytest.mark.parametrize("kind", ["n_gram", "another model", "first layer", *HEADS])
def test_tokens_are_those_without(gpus: Ranks, matrix: Matrix, tmp_path: Path, kind: str) -> None:
    speculation = configure(kind, matrix.directory, tmp_path)
    settings = {"device": "cuda", "dtype": "float32", "capture": "lazy", "memory_fraction": 0.2}  # measured, as served
    runner = gpus.load(matrix.directory, speculation=speculation, **settings | LIMITS)
    replica = Replica(runner, runner.slots)  # type: ignore[arg-type]
    found = replica.run(matrix.jobs, random.Random(1), arrival=0.8)
    assert [(answer.tokens, answer.end) for answer in found] == [(each.tokens, each.end) for each in matrix.answers]
    assert replica.figures.num_accepted_tokens > 0
    leader, other = gpus.call("figures")
    assert leader["graph_replays_total"] == other["graph_replays_total"] > 0
    runner.close()
