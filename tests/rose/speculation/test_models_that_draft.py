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
from tests.rose.speculation.checked import Checked, check_drafts
from tests.rose.speculation.heads_random import write_random_head
from tests.rose.speculation.matrix import LARGE_CACHE, SMALL_CACHE, Matrix, make_runner
from tests.rose.speculation.replica import Jobs, Replica
from tests.rose.tiny_lm import write_llama, write_qwen3, write_relative

PROPOSERS = ["another model", "first layer", "mtp", "eagle"]
LENGTHS = [("llama", 1), ("llama", 2), ("llama", 3), ("llama", 4), ("qwen3", 2)]  # k
LONG, SHORT = 0, 9  # jobs of the matrix: the second ends after three tokens
MOST_PROMPT_STEPS = 3  # of both
BLOCKS = {"another model": 2 * SMALL_CACHE, "first layer": SMALL_CACHE}  # as many with the draft's own cache beside


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    directory = tmp_path_factory.mktemp("targets")
    return {
        "llama": Matrix(write_llama(directory / "llama", tokenizer=True)),
        "qwen3": Matrix(write_qwen3(directory / "qwen3", tokenizer=True)),
    }


@pytest.fixture
def matrix(matrices: dict[str, Matrix]) -> Matrix:
    return matrices["llama"]


def configure(directory: Path, target: Path, kind: str, k: int, **settings: Any) -> SpeculationConfig:
    """A proposer for the model in `target`, its files in `directory`."""
    settings["num_draft_tokens"] = k
    if kind == "first layer":
        return SpeculationConfig(proposer="draft_model", num_layers=1, **settings)
    if kind == "another model":
        model = write_relative(directory, target, noise=0.1)
        return SpeculationConfig(proposer="draft_model", model=str(model), **settings)
    head = write_random_head(directory, target, kind)  # type: ignore[arg-type]
    return SpeculationConfig(proposer="mtp", model=str(head), **settings)


@contextmanager
def runner_with(
    matrix: Matrix, speculation: SpeculationConfig, blocks: int = LARGE_CACHE
) -> Iterator[tuple[ModelRunner, Checked]]:
    opened: list[Checked] = []
    with pytest.MonkeyPatch.context() as patch:
        loads = {name: check_drafts(load, opened, matrix.texts) for name, load in registry.PROPOSERS.items()}
        patch.setattr(registry, "PROPOSERS", loads)
        runner = make_runner(matrix.directory, speculation, blocks)
    yield runner, opened[-1]
    runner.close()


def run(runner: ModelRunner, jobs: Jobs) -> Replica:
    """One after the other."""
    replica = Replica(runner)
    for job in jobs:
        replica.run([job], random.Random(0))
    return replica


@pytest.mark.parametrize(("family", "k"), LENGTHS)
@pytest.mark.parametrize("kind", PROPOSERS)
def test_together(matrices: dict[str, Matrix], tmp_path: Path, kind: str, family: str, k: int) -> None:
    """Batched, in chunks, preempted, over blocks of others, beside sequences that are given up."""
    matrix = matrices[family]
    speculation = configure(tmp_path, matrix.directory, kind, k)
    with runner_with(matrix, speculation, BLOCKS.get(kind, SMALL_CACHE * 3 // 2)) as (runner, checked):
        figures = matrix.check_together(runner, aborts={0: 9, 3: 20}).figures
        assert figures.num_preemptions > 0
        assert figures.num_prefix_hit_tokens > 0
        assert 0 < figures.num_accepted_tokens < figures.num_draft_tokens
        assert checked.num_checked > 10
        assert checked.num_lapsed == 0


@pytest.mark.parametrize("k", [1, 3])
def test_a_head_that_runs_over_rejected_tokens_too(matrix: Matrix, tmp_path: Path, k: int) -> None:
    speculation = configure(tmp_path, matrix.directory, "mtp", k, head_tokens="all")
    with runner_with(matrix, speculation, SMALL_CACHE * 3 // 2) as (runner, checked):
        figures = matrix.check_together(runner).figures
        assert 0 < figures.num_accepted_tokens < figures.num_draft_tokens
        assert checked.num_checked > 10


@pytest.mark.parametrize("kind", PROPOSERS)
def test_a_common_beginning_that_ends_with_a_block(matrix: Matrix, tmp_path: Path, kind: str) -> None:
    """A head's entry depends on the token after: the last of a block that others go on from differently."""
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    jobs = [([*range(10, 42), *tail], greedy) for tail in ([50, 51], [60], [70, 71, 72], [50, 52])]
    with runner_with(matrix, configure(tmp_path, matrix.directory, kind, 2)) as (runner, checked):
        replica = run(runner, jobs)
        assert replica.figures.num_prefix_hit_tokens >= 3 * BLOCK_SIZE
        assert checked.num_checked > 10


@pytest.mark.parametrize("kind", PROPOSERS)
def test_where_many_run_a_draft_lapses(matrix: Matrix, tmp_path: Path, kind: str) -> None:
    """In a batch that the table has no drafts for: sequences of it draft no more. What comes later, alone, does.

    First layers are the target's, so nothing of theirs can lapse.
    """
    speculation = configure(tmp_path, matrix.directory, kind, 2, draft_lengths=[(1, 2), (2, 0)])
    with runner_with(matrix, speculation) as (runner, checked):
        matrix.check_together(runner)
        num_lapsed = checked.num_lapsed
        assert (num_lapsed > 0) == (kind != "first layer")
        checked.num_lapsed = checked.num_checked = 0
        matrix.check_alone(runner)
        assert checked.num_checked > 50


@pytest.mark.parametrize("kind", ["another model", "mtp"])
def test_what_has_lapsed_costs_no_more_passes(matrix: Matrix, tmp_path: Path, kind: str) -> None:
    """A long sequence beside a short one, then alone: the draft runs over their prompts and never again."""
    speculation = configure(tmp_path, matrix.directory, kind, 2, draft_lengths=[(1, 2)])
    with runner_with(matrix, speculation) as (runner, checked):
        module = checked._proposer._head if kind == "mtp" else checked._proposer._model  # type: ignore[attr-defined]
        runs: list[None] = []
        module.register_forward_hook(lambda *_: runs.append(None))
        replica = Replica(runner)
        found = replica.run([matrix.jobs[LONG], matrix.jobs[SHORT]], random.Random(1), arrival=1.0)
        assert [answer.tokens for answer in found] == [matrix.answers[index].tokens for index in (LONG, SHORT)]
        assert checked.num_lapsed > 15
        assert len(runs) <= MOST_PROMPT_STEPS
