"""Drafts of two ranks: the tokens are those of one without, whoever drafts and on how many ranks it runs."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.types import SamplingParams
from rose.config import SpeculationConfig
from tests.rose.distributed.ranks import Ranks, RemoteRunner
from tests.rose.speculation.heads_random import write_random_head
from tests.rose.speculation.matrix import BLOCK_BYTES, LIMITS, SMALL_CACHE, Matrix, make_runner
from tests.rose.speculation.replica import Replica
from tests.rose.tiny_lm import write_llama, write_relative

MANY_BLOCKS = 200  # as many as all sequences can use, on one rank or two
HEADS_SETTINGS: dict[str, dict[str, Any]] = {  # by what is said behind its kind
    "": {},
    "on the leader": {"head_ranks": "leader"},
    "on the leader, some tokens": {"head_ranks": "leader", "draft_vocab": 160},
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(write_llama(tmp_path_factory.mktemp("target"), tokenizer=True))


def configure(kind: str, target: Path, directory: Path, k: int = 2) -> SpeculationConfig:
    match kind:
        case "n_gram":
            return SpeculationConfig(proposer="n_gram", num_draft_tokens=k)
        case "another model":  # on the leader alone
            model = str(write_relative(directory, target, noise=0.1))
            return SpeculationConfig(proposer="draft_model", model=model, num_draft_tokens=k)
        case "first layer":  # each rank has its part
            return SpeculationConfig(proposer="draft_model", num_layers=1, num_draft_tokens=k)
    head = write_random_head(directory, target, kind.partition(" ")[0])  # type: ignore[arg-type]
    settings = HEADS_SETTINGS[kind.partition(" ")[2]]
    return SpeculationConfig(proposer="mtp", model=str(head), num_draft_tokens=k, **settings)


def compare(
    ranks: Ranks, matrix: Matrix, speculation: SpeculationConfig, blocks_of_one: int, blocks_of_two: int
) -> tuple[Replica, RemoteRunner]:
    """Two ranks, whose tokens are those without drafts, and what is counted that of one rank that drafts. Each may take
    memory for so many blocks of the whole target."""
    one = make_runner(matrix.directory, speculation, blocks_of_one)
    alone = Replica(one)
    alone.run(matrix.jobs, random.Random(1), arrival=0.8)
    one.close()
    settings = {"dtype": "float32", "kv_cache_bytes": blocks_of_two * BLOCK_BYTES} | LIMITS
    runner = ranks.load(matrix.directory, speculation=speculation, **settings)
    replica = Replica(runner, runner.slots)  # type: ignore[arg-type]
    ranks.call("keep_drafts")
    found = replica.run(matrix.jobs, random.Random(1), arrival=0.8)
    assert [(answer.tokens, answer.end) for answer in found] == [(each.tokens, each.end) for each in matrix.answers]
    assert replica.figures.num_accepted_tokens > 0
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_at", "num_preemptions", "num_prefix_hit_tokens"):
        assert getattr(replica.figures, name) == getattr(alone.figures, name)
    return replica, runner


@pytest.mark.parametrize(
    "kind", ["n_gram", "another model", "first layer", "mtp", pytest.param("eagle", marks=pytest.mark.long)]
)
def test_tokens_are_those_without_and_drafts_those_of_one_rank(
    ranks: Ranks, matrix: Matrix, tmp_path: Path, kind: str
) -> None:
    speculation = configure(kind, matrix.directory, tmp_path)
    _, runner = compare(ranks, matrix, speculation, MANY_BLOCKS, MANY_BLOCKS)
    leader, other = ranks.call("drafts")
    assert leader
    if kind != "another model":  # which the leader alone has
        assert other == leader  # a rank that drafts another token would spoil those behind it on every rank
    runner.close()


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        ("mtp on the leader", 3),
        ("eagle on the leader, some tokens", 1),
        pytest.param("mtp on the leader", 1, marks=pytest.mark.long),
        pytest.param("mtp on the leader, some tokens", 3, marks=pytest.mark.long),
        pytest.param("eagle on the leader", 1, marks=pytest.mark.long),
        pytest.param("eagle on the leader", 3, marks=pytest.mark.long),
    ],
)
def test_a_head_on_the_leader_alone(ranks: Ranks, matrix: Matrix, tmp_path: Path, kind: str, k: int) -> None:
    """In so little memory that sequences yield to each other. A head's cache is half of the target's, and whole."""
    speculation = configure(kind, matrix.directory, tmp_path, k)
    replica, runner = compare(ranks, matrix, speculation, SMALL_CACHE * 3 // 2, SMALL_CACHE)
    assert [facts.num_blocks for facts in runner.facts_of_ranks] == [SMALL_CACHE - 1] * 2
    assert replica.figures.num_preemptions > 0
    assert replica.figures.num_prefix_hit_tokens > 0
    leader, other = ({token for step in drafts for row in step for token in row} for drafts in ranks.call("drafts"))
    assert len(leader) > 8
    assert other == {0}  # nobody drafts there
    assert speculation.draft_vocab is None or max(leader) < speculation.draft_vocab
    runner.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("another model", "mtp")), "mtp on the leader"]
)
def test_the_gpus_way(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Steps with drafts are captured whole: proposal, forward pass, acceptance, and what the leader says of both."""
    target = write_llama(tmp_path / "target", tokenizer=True, num_hidden_layers=1)
    jobs = [([5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=9)), ([9], SamplingParams(seed=2, max_tokens=7))]
    one = make_runner(target, blocks=MANY_BLOCKS)
    expected = Replica(one).run(jobs, random.Random(1), arrival=1.0)
    one.close()
    speculation = configure(kind, target, tmp_path / "draft")
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "max_graph_tokens": 0}
    runner = ranks.load(
        target, static=True, speculation=speculation, capture="lazy", dtype="float32",
        kv_cache_bytes=MANY_BLOCKS * BLOCK_BYTES, **sizes,
    )  # fmt: skip
    replica = Replica(runner, runner.slots)  # type: ignore[arg-type]
    found = replica.run(jobs, random.Random(1), arrival=1.0)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]  # greedy drafts change no draw
    assert replica.figures.num_drafts > 0
    for figures in ranks.call("figures"):
        assert figures["graph_replays_total"] > 0
    runner.close()
