"""Weights made from a seed: the same every time, a rank's the slice of the whole, and of the spread that was asked."""

from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from torch import Tensor, nn

from ipc.types import ModelFacts, SamplingParams
from rose.config import RankConfig, SpeculationConfig
from rose.decoder_loader import DecoderLoader
from rose.distributed.group import ALONE, Group
from rose.distributed.shard import Shard
from rose.layers.linear import RowsLinear
from rose.model_runner import ModelRunner
from rose.models.config import ModelError, read_config
from rose.models.load import load_model
from rose.models.task import GenerateTask
from rose.speculation.heads import load_head
from rose.speculation.protocol import Target
from rose.weights import random
from rose.weights.loader import load_weights
from rose.weights.random_file import FILE_NAME, RandomTensor, RandomWeights
from services.random_shapes import HEADS, SHAPES
from services.sources import resolve_source
from tests.rose.distributed.test_shard import Silent
from tests.rose.speculation.replica import Replica

CPU = torch.device("cpu")


def load(directory: Path, group: Group = ALONE, dtype: torch.dtype = torch.float32) -> nn.Module:
    return load_model(directory, read_config(directory), GenerateTask(()), CPU, dtype, group)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of several tiles, whose edges are no shard's."""
    monkeypatch.setattr(random, "TILE", 24)


def test_the_same_for_a_seed_and_others_for_another(tmp_path: Path) -> None:
    first, again = (parameters(load(resolve_source("random:tiny?seed=5", tmp_path / name))) for name in "ab")
    other = parameters(load(resolve_source("random:tiny", tmp_path)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_numbers_are_of_the_mean_and_spread_asked_and_no_two_tiles_alike(tmp_path: Path) -> None:
    found = parameters(load(resolve_source("random:tiny", tmp_path)))
    up = found["model.layers.1.mlp.gate_up_proj.weight"]
    assert up.mean().abs() < 0.01
    assert up.std() == pytest.approx(64**-0.5, rel=0.05)
    norm = found["model.norm.weight"]
    assert (norm.mean().item(), norm.std().item()) == pytest.approx((1.0, 0.1), rel=0.3)
    tiles = up[:144, :48].unflatten(0, (6, 24)).unflatten(2, (2, 24)).transpose(1, 2).reshape(12, -1)
    assert torch.corrcoef(tiles).fill_diagonal_(0).abs().max() < 0.3
    assert not torch.equal(
        found["model.layers.0.self_attn.o_proj.weight"], found["model.layers.1.self_attn.o_proj.weight"]
    )


def test_a_dtype_rounds_the_same_numbers(tmp_path: Path) -> None:
    directory = resolve_source("random:tiny", tmp_path)
    exact, rounded = parameters(load(directory)), parameters(load(directory, dtype=torch.bfloat16))
    assert all(torch.equal(rounded[name], values.bfloat16()) for name, values in exact.items())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("begin", "end"), [(0, 31), (31, 60), (47, 49), (48, 72), (5, 5)])
def test_a_part_is_the_slice_of_the_whole(dim: int, begin: int, end: int) -> None:
    shape = [72, 72]
    shape[dim] = 75
    stored = random.RandomStored("1 name", RandomTensor(shape, 0.5, 2.0))
    whole = torch.empty(shape)
    stored.fill(whole, None)
    expected = whole.narrow(dim, begin, end - begin)
    part = torch.empty_like(expected)
    stored.fill(part, Shard(dim, shape[dim], begin, end))
    assert torch.equal(part, expected)


def test_each_ranks_model_is_its_part_of_the_whole(tmp_path: Path) -> None:
    directory = resolve_source("random:tiny", tmp_path)
    whole = parameters(load(directory))
    parts = [parameters(load(directory, Silent(rank))) for rank in range(2)]
    head = "lm_head.weight"
    assert torch.equal(torch.cat([part[head] for part in parts]), whole[head])
    down = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(torch.cat([part[down] for part in parts], 1), whole[down])
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    q, k, v = whole[qkv].split((64, 32, 32))
    for rank, part in enumerate(parts):
        expected = torch.cat([one.chunk(2)[rank] for one in (q, k, v)])
        assert torch.equal(part[qkv], expected)


def test_a_few_rows_of_a_matrix(tmp_path: Path) -> None:
    class Scores(nn.Module):
        unused = ("model.",)

        def __init__(self) -> None:
            super().__init__()
            self.lm_head = RowsLinear(64, (70, 3))

    directory, scores = resolve_source("random:tiny", tmp_path), Scores()
    load_weights(scores, [directory / FILE_NAME])
    assert torch.equal(scores.lm_head.weight, parameters(load(directory))["lm_head.weight"][[70, 3]])


def test_heads_and_draft_models_draft_for_a_random_model(tmp_path: Path) -> None:
    """Greedy tokens are those without drafts, though few drafts are right."""
    target, job = (
        resolve_source("random:tiny", tmp_path),
        [([7, 300, 12, 90, 255], SamplingParams(temperature=0.0, max_tokens=12))],
    )
    answers = []
    for proposer, source in (
        ("none", None),
        ("mtp", "random:tiny?head=mtp"),
        ("mtp", "random:tiny?head=eagle"),
        ("draft_model", "random:tiny?seed=1"),
    ):
        model = None if source is None else str(resolve_source(source, tmp_path))
        drafts = SpeculationConfig(proposer=proposer, num_draft_tokens=2, model=model)
        config = RankConfig(device="cpu", num_threads=1, max_num_seqs=2, max_model_len=64, speculation=drafts)
        runner = ModelRunner(DecoderLoader("tiny", target, config))
        runner.load()
        replica = Replica(runner)
        answers.append(replica.run(job, Random(1))[0].tokens)
        assert (replica.figures.num_drafts > 0) == (proposer != "none")
        runner.close()
    assert answers[1:] == answers[:1] * 3
    assert len(answers[0]) == 12
    assert len(set(answers[0])) > 2


@pytest.mark.parametrize("head", ["mtp", "eagle"])
def test_a_model_that_always_says_the_same_and_heads_that_know_it(tmp_path: Path, head: str) -> None:
    target = resolve_source("random:tiny?says=9", tmp_path)
    drafts = SpeculationConfig(
        proposer="mtp", num_draft_tokens=3, model=str(resolve_source(f"random:tiny?says=9&head={head}", tmp_path))
    )
    config = RankConfig(device="cpu", num_threads=1, max_num_seqs=2, max_model_len=64, speculation=drafts)
    runner = ModelRunner(DecoderLoader("tiny", target, config))
    runner.load()
    replica = Replica(runner)
    jobs = [(prompt, SamplingParams(temperature=0.0, max_tokens=21)) for prompt in ([7, 300, 12], [2, 9, 9, 4])]
    assert [answer.tokens for answer in replica.run(jobs, Random(1))] == [[9] * 21] * 2
    figures = replica.figures
    assert figures.num_accepted_tokens == figures.num_draft_tokens >= 2 * 15
    runner.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", [None, *HEADS])
def test_every_shape_has_the_tensors_of_its_model(
    tmp_path: Path, shape: str, head: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and size, also of one rank of two; nothing is filled."""
    monkeypatch.setattr(random.RandomStored, "fill", lambda stored, place, shard: None)
    target = resolve_source(f"random:{shape}", tmp_path)
    config, meta = read_config(target), torch.device("meta")
    for group in (ALONE, Silent(1)):
        if head is None:
            load_model(target, config, GenerateTask(()), meta, torch.bfloat16, group)
            continue
        facts = ModelFacts(shape, "", "generate", config.vocab_size, 64, 1, 1, 1)
        directory = resolve_source(f"random:{shape}?head={head}&says=1", tmp_path)
        load_head(directory, Target(nn.Identity(), config, target, facts, torch.bfloat16, meta, group))


def test_a_damaged_file_and_a_tensor_of_three_dimensions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text("{}")
    with pytest.raises(ModelError, match="no file of random weights"):
        random.read_random(path)
    tensor = RandomTensor([2, 2, 2], 0.0, 1.0)
    path.write_bytes(msgspec.json.encode(RandomWeights(0, {"conv": tensor})))
    with pytest.raises(ModelError, match="conv has 3 dimensions"):
        random.read_random(path)


def test_tensors_that_the_model_lacks_and_lacks_not(tmp_path: Path) -> None:
    directory = resolve_source("random:tiny", tmp_path)
    path = directory / FILE_NAME
    weights = random.read_random(path)
    fewer = {name: tensor for name, tensor in weights.tensors.items() if name != "model.norm.weight"}
    path.write_bytes(msgspec.json.encode(RandomWeights(0, fewer)))
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        load(directory)
    path.write_bytes(msgspec.json.encode(RandomWeights(0, weights.tensors | {"more": RandomTensor([2], 0, 1)})))
    with pytest.raises(ModelError, match="holds 'more'"):
        load(directory)
