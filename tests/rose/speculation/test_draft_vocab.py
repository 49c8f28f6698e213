"""Drafts of some tokens alone: none of the others is drafted, and what comes out is what comes out without drafts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rose.kernels.draft_rows import spread_logits
from rose.models.config import ModelError
from rose.speculation.draft_vocab import DraftVocab
from tests.rose.speculation.heads_random import write_random_head
from tests.rose.speculation.matrix import SMALL_CACHE, Matrix, make_runner
from tests.rose.speculation.whole_steps import MIXED, K, World, configure, write_models
from tests.rose.tiny_lm import VOCAB_SIZE, write_llama, write_relative

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IDS = list(range(VOCAB_SIZE - 1, 4, -2))  # every other one, the last first


def test_logits_are_the_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(n, 32, generator=generator) for n in (VOCAB_SIZE, 3))
    ids = torch.tensor(IDS)
    logits = DraftVocab(weight[ids], ids, VOCAB_SIZE)(hidden)
    assert torch.equal(logits[:, ids], F.linear(hidden, weight[ids]))
    assert logits[:, ::2].max() == float("-inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spread_by_a_kernel(dtype: torch.dtype) -> None:
    vocab_size = 5000
    said = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))[:40].to(DEVICE)
    places = torch.full((vocab_size,), -1, dtype=torch.int32, device=DEVICE)
    places[ids] = torch.arange(40, dtype=torch.int32, device=DEVICE)
    expected = torch.full((3, vocab_size), float("-inf"), device=DEVICE)
    expected[:, ids] = said.float()
    assert torch.equal(spread_logits(said, places), expected)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_models(directory)
    (directory / "ids.json").write_text(json.dumps(IDS))
    return directory


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the same by kernels: test_whole_steps")
@pytest.mark.parametrize("kind", ["another model", "first layer", "mtp", "eagle"])
def test_nothing_else_is_drafted(directory: Path, kind: str) -> None:
    """Nor has it a chance in what drafts are drawn from."""
    settings = {"draft_vocab": 60, "draft_vocab_ids": str(directory / "ids.json"), "draft_sampling": "sampled"}
    world = World(directory, kind, way="torch", device=DEVICE, params=MIXED, **settings)
    ids, tokens = torch.tensor(IDS[:60]), []
    for _ in range(4):
        drafts, _, _ = world.step(K)
        assert drafts is not None
        assert drafts.probabilities is not None
        assert torch.isin(drafts.tokens, ids).all()
        torch.testing.assert_close(drafts.probabilities[:, :, ids].sum(2), torch.ones(drafts.tokens.shape))
        rest = drafts.probabilities.clone()
        rest[:, :, ids] = 0
        assert not rest.any()
        tokens.append(drafts.tokens)
    assert len(torch.cat(tokens).unique()) > 8


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(write_llama(tmp_path_factory.mktemp("target"), tokenizer=True))


@pytest.mark.parametrize("kind", ["another model", "first layer", "mtp"])
def test_greedy_tokens_are_those_without_drafts(matrix: Matrix, tmp_path: Path, kind: str) -> None:
    """A target that says tokens outside, too; its head is one for a CPU, as served."""
    write_relative(tmp_path / "another model", matrix.directory, noise=0.1)
    write_random_head(tmp_path / "mtp", matrix.directory, "mtp")
    speculation = configure(tmp_path, kind, num_draft_tokens=3, draft_vocab=160)
    runner = make_runner(matrix.directory, speculation, 2 * SMALL_CACHE)
    figures = matrix.check_together(runner).figures
    runner.close()
    assert 0 < figures.num_accepted_tokens < figures.num_draft_tokens
    said = [token for answer in matrix.answers for token in answer.tokens]
    assert min(said) < 160 < max(said)


@pytest.mark.parametrize(
    ("fields", "text", "message"),
    [
        ({"draft_vocab": 0}, "[]", "must be 1..320 with .*, got 0"),
        ({"draft_vocab": 321}, "[]", "must be 1..320 with .*, got 321"),
        ({"draft_vocab_ids": "{}"}, "[1]", "draft_vocab_ids needs speculation.draft_vocab"),
        ({"draft_vocab": 2, "draft_vocab_ids": "{}"}, "[1]", "has 1 ids, speculation.draft_vocab is 2: lower it"),
        ({"draft_vocab": 2, "draft_vocab_ids": "{}"}, "[1, 320]", "names token 320, the vocabulary has 320"),
        ({"draft_vocab": 2, "draft_vocab_ids": "{}"}, "[1, 1, 2]", "names a token twice"),
        ({"draft_vocab": 2, "draft_vocab_ids": "{}"}, "{1}", "is not JSON"),
        ({"draft_vocab": 2, "draft_vocab_ids": "{}"}, "[" * 100_000, "is not JSON"),
        ({"draft_vocab": 2, "draft_vocab_ids": "{}"}, '{"a": 1}', "is not a list of token ids"),
        ({"draft_vocab": 2, "draft_vocab_ids": "nowhere"}, "", "nowhere cannot be read"),
    ],
)
def test_settings_that_are_refused(
    directory: Path, tmp_path: Path, fields: dict[str, Any], text: str, message: str
) -> None:
    path = tmp_path / "ids.json"
    path.write_text(text)
    fields = {name: str(path) if value == "{}" else value for name, value in fields.items()}
    with pytest.raises(ModelError, match=message):
        World(directory, "first layer", way="torch", device=DEVICE, **fields)
