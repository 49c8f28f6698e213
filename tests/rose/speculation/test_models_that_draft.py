"""Draft models and heads: no token changes, and every draft is what the model says of the whole sequence."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ipc.types import SamplingParams
from rose.config import SpeculationConfig
from rose.kv_cache import BLOCK_SIZE
from rose.model_runner import ModelRunner
from rose.speculation import registry
from rose.speculation.heads_random import write_random_head
from tests.rose.speculation.checked import Checked, check_drafts
from tests.rose.speculation.matrix import LARGE_CACHE, SMALL_CACHE, Matrix, make_runner
from tests.rose.speculation.replica import Replica
from tests.rose.tiny_lm import write_llama, write_qwen3

WRITE = {"llama": write_llama, "qwen3": write_qwen3}
PROPOSERS = ["another model", "first layer", "mtp", "eagle"]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(WRITE[request.param](tmp_path_factory.mktemp(request.param), tokenizer=True))


def configure(directory: Path, target: Path, kind: str, k: int, **settings: Any) -> SpeculationConfig:
    """A proposer for the model in `target`, its files in `directory`."""
    settings["num_draft_tokens"] = k
    if kind == "first layer":
        return SpeculationConfig(proposer="draft_model", num_layers=1, **settings)
    if kind == "another model":
        write_llama(directory, seed=7, num_hidden_layers=1, num_attention_heads=2, tokenizer=True)
        return SpeculationConfig(proposer="draft_model", model=str(directory), **settings)
    write_random_head(directory, target, kind)  # type: ignore[arg-type]
    return SpeculationConfig(proposer="mtp", model=str(directory), **settings)


@contextmanager
def runner_with(
    directory: Path, speculation: SpeculationConfig, blocks: int = LARGE_CACHE
) -> Iterator[tuple[ModelRunner, Checked]]:
    opened: list[Checked] = []
    with pytest.MonkeyPatch.context() as patch:
        loads = {name: check_drafts(load, opened) for name, load in registry.PROPOSERS.items()}
        patch.setattr(registry, "PROPOSERS", loads)
        runner = make_runner(directory, speculation, blocks)
    yield runner, opened[-1]
    runner.close()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", PROPOSERS)
def test_together(matrix: Matrix, tmp_path: Path, kind: str, k: int) -> None:
    """Batched, in chunks, preempted, over blocks of others, beside sequences that are given up."""
    speculation = configure(tmp_path, matrix.directory, kind, k)
    blocks = SMALL_CACHE if kind == "first layer" else SMALL_CACHE * 3 // 2  # as many, beside a cache of one layer
    with runner_with(matrix.directory, speculation, blocks) as (runner, checked):
        figures = matrix.check_together(runner, aborts={0: 9, 3: 20}).figures
        assert figures.num_preemptions > 0
        assert figures.num_prefix_hit_tokens > 0
        assert checked.num_checked > 50
        assert checked.num_lapsed == 0


@pytest.mark.parametrize("kind", PROPOSERS)
def test_alone(matrix: Matrix, tmp_path: Path, kind: str) -> None:
    with runner_with(matrix.directory, configure(tmp_path, matrix.directory, kind, 3)) as (runner, checked):
        matrix.check_alone(runner)
        assert checked.num_lapsed == 0


@pytest.mark.parametrize("kind", PROPOSERS)
def test_a_common_beginning_that_ends_with_a_block(matrix: Matrix, tmp_path: Path, kind: str) -> None:
    """A head's entry depends on the token after: the last of a block that others go on from differently."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    jobs = [([*range(10, 42), *tail], greedy) for tail in ([50, 51], [60], [70, 71, 72], [50, 52])]
    with runner_with(matrix.directory, configure(tmp_path, matrix.directory, kind, 2)) as (runner, checked):
        replica = Replica(runner)
        for job in jobs:
            replica.run([job], random.Random(0))
        assert replica.figures.num_prefix_hit_tokens >= 3 * BLOCK_SIZE
        assert checked.num_checked > 20
