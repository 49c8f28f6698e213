"""What `bouquet check` finds that a stack would find only once it starts: with the default models' real files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.config import build_config
from services.model_checks import check_placement, find_refusals
from services.placement import PlacementError
from services.sources import resolve_source

MAX_LEN = 64
TINY_BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, tokens, heads, head_dim, bytes

Find = Callable[[dict[str, Any]], list[str]]


@pytest.fixture
def find(minilm_dir: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """Refusals of both models with given [rank] settings and `tensor_parallel_size`; they compute on CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    directories = {"embedder": minilm_dir, "writer": smollm2_dir}

    def made(settings: dict[str, Any]) -> list[str]:
        rank = {key: value for key, value in settings.items() if key != "tensor_parallel_size"}
        sizes = {key: value for key, value in settings.items() if key == "tensor_parallel_size"}
        models = [{"name": name, "source": str(path), **sizes} for name, path in directories.items()]
        return find_refusals(build_config({"models": models, "rank": {"device": "cpu"} | rank}, Path()), directories)

    return made


def test_nothing_is_wrong_with_the_default_models(find: Find) -> None:
    assert find({}) == []


@pytest.mark.parametrize(
    ("settings", "refusals"),
    [
        (
            {"tensor_parallel_size": 2},
            ["models[1] (writer): tensor_parallel_size 2 does not divide the model's num_attention_heads, 9"],
        ),
        (
            {"tensor_parallel_size": 5},
            [
                "models[0] (embedder): tensor_parallel_size 5 does not divide",
                "models[1] (writer): tensor_parallel_size 5 does not divide",
            ],
        ),
        ({"kv_cache_bytes": 1000}, ["models[1] (writer): the key-value cache may take 1000 bytes"]),
        (
            {"max_num_batched_tokens": 1},
            [
                "models[0] (embedder): max_num_batched_tokens 1 is below max_model_len",
                "models[1] (writer): max_num_batched_tokens 1 is below max_num_seqs",
            ],
        ),
        (
            {"speculation": {"proposer": "n_gram"}},
            ["models[0] (embedder): speculation.proposer is for language models"],
        ),
        ({"task": "generate"}, ["models[0] (embedder): "]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_rank_refuses(find: Find, settings: dict[str, Any], refusals: list[str]) -> None:
    found = find(settings)
    assert len(found) == len(refusals), found
    for problem, beginning in zip(found, refusals, strict=True):
        assert problem.startswith(beginning)


def test_a_device_that_is_not_there(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = find({"device": "cuda"})
    assert [problem.split(":")[0] for problem in found] == ["models[0] (embedder)", "models[1] (writer)"]
    assert all("torch finds none" in problem for problem in found)


def test_a_draft_that_is_not_there(find: Find, tmp_path: Path) -> None:
    found = find({"speculation": {"proposer": "draft_model", "model": str(tmp_path / "nowhere")}})
    assert any(f"{tmp_path}/nowhere/config.json is missing" in problem for problem in found)
    (tmp_path / "file").touch()
    found = find({"speculation": {"proposer": "draft_model", "model": str(tmp_path / "file")}})
    assert any(f"{tmp_path}/file/config.json cannot be read: Not a directory" in problem for problem in found)


@pytest.mark.parametrize(
    ("source", "settings", "refusal"),
    [
        ("tiny", {"proposer": "draft_model", "num_layers": 9}, "speculation.num_layers must be 1..1 with this target"),
        ("tiny", {"proposer": "draft_model", "num_layers": 2}, "speculation.num_layers must be 1..1 with this target"),
        (
            "tiny",
            {"proposer": "draft_model", "num_layers": 1, "draft_vocab": 513},
            "speculation.draft_vocab must be 1..512",
        ),
        (
            "tiny",
            {"proposer": "draft_model", "num_layers": 1, "draft_vocab": 5, "draft_vocab_ids": "/nope"},
            "speculation.draft_vocab_ids: /nope cannot be read",
        ),
        ("tiny", {"proposer": "mtp", "model": "tiny"}, "holds several layers"),
        ("tiny", {"proposer": "mtp", "model": "llama-1b?head=mtp"}, "this head is another model's"),
        ("tiny", {"proposer": "mtp", "model": "tiny?head=mtp", "draft_vocab": 513}, "must be 1..512"),
        ("tiny", {"proposer": "draft_model", "model": "tiny?head=eagle"}, "is a draft head, no model"),
        ("tiny", {"proposer": "draft_model", "model": "llama-1b"}, "has another vocabulary"),
        ("tiny?head=mtp", {}, "is a draft head: speculation.model of another model names it"),
        ("tiny?head=eagle", {}, "is a draft head: speculation.model of another model names it"),
        ("tiny", {"proposer": "mtp", "model": "tiny?head=mtp", "draft_vocab": 512}, None),
        ("tiny", {"proposer": "mtp", "model": "tiny?head=eagle"}, None),
        ("tiny", {"proposer": "mtp", "model": "tiny?head=mtp", "head_ranks": "leader", "draft_vocab": 512}, None),
        ("tiny", {"proposer": "draft_model", "model": "tiny?seed=1", "draft_vocab": 8}, None),
        ("tiny", {"proposer": "draft_model", "num_layers": 1}, None),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_what_drafts_are_refused(
    source: str, settings: dict[str, Any], refusal: str | None, size: int, tmp_path: Path
) -> None:
    def made(shape: str) -> str:
        return str(resolve_source(f"random:{shape}", tmp_path))

    drafts = settings | {key: made(shape) for key, shape in settings.items() if key == "model"}
    model = {"name": "m", "source": made(source), "tensor_parallel_size": size}
    config = build_config({"models": [model], "rank": {"device": "cpu", "speculation": drafts}}, Path())
    is_divided = drafts.get("model") != made("tiny?seed=1") and "head_ranks" not in drafts
    if size > 1 and "draft_vocab" in drafts and is_divided:
        refusal = "speculation.draft_vocab: "
    found = find_refusals(config, {"m": Path(made(source))})
    assert len(found) == (refusal is not None), found
    assert all(line.startswith("models[0] (m): ") and str(refusal) in line for line in found)


@pytest.mark.parametrize(
    ("settings", "size", "shared_by"),
    [
        ({}, 1, 1),
        ({"proposer": "draft_model", "num_layers": 1}, 1, 1),
        ({"proposer": "draft_model", "model": "tiny?seed=1"}, 1, 2),  # as large as the target's own
        ({"proposer": "draft_model", "model": "tiny?seed=1"}, 2, 3),  # whole on the leading rank, the target's halved
        ({"proposer": "mtp", "model": "tiny?head=mtp"}, 1, 1.5),  # one layer to the target's two
        ({"proposer": "mtp", "model": "tiny?head=mtp"}, 2, 1.5),
        ({"proposer": "mtp", "model": "tiny?head=mtp", "head_ranks": "leader"}, 2, 2),
    ],
)
def test_a_cache_with_room_for_the_drafts_own(
    settings: dict[str, Any], size: int, shared_by: float, tmp_path: Path
) -> None:
    """In a given number of bytes: just enough, and one too few."""
    directory = resolve_source("random:tiny", tmp_path)
    drafts = settings | {
        key: str(resolve_source(f"random:{shape}", tmp_path)) for key, shape in settings.items() if key == "model"
    }
    num_blocks = MAX_LEN // 16 + 1  # and the one for what is no token's
    budget = int(num_blocks * TINY_BLOCK_BYTES // size * shared_by)
    for num_bytes, fits in ((budget, True), (budget - 1, False)):
        rank = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": num_bytes, "max_model_len": MAX_LEN}
        model = {"name": "m", "source": str(directory), "tensor_parallel_size": size}
        config = build_config({"models": [model], "rank": rank | {"speculation": drafts}}, Path())
        found = find_refusals(config, {"m": directory})
        assert len(found) == (not fits), found
        assert all(f"the key-value cache may take {num_bytes} bytes" in line for line in found)


@pytest.mark.parametrize("content", ["[]", "5", "{}", '{"model_type": []}', "[" * 100_000], ids=lambda text: text[:20])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_damaged_files_are_told_by_name(name: str, content: str, tmp_path: Path) -> None:
    """Of a model, and of what drafts for it."""
    own, whole = (resolve_source(f"random:tiny?seed={seed}", tmp_path) for seed in (1, 2))
    (own / name).write_text(content)
    drafts = {"proposer": "draft_model", "model": str(own)}
    for source, speculation in ((own, {}), (whole, drafts)):
        models = [{"name": "m", "source": str(source)}]
        config = build_config({"models": models, "rank": {"device": "cpu", "speculation": speculation}}, Path())
        found = find_refusals(config, {"m": source})
        is_object = content.startswith("{") and name == "generation_config.json"
        assert bool(found) != is_object, found
        assert all(str(own / name) in line for line in found), found


def test_a_task_that_the_model_has_no_class_for(tmp_path: Path) -> None:
    directory = resolve_source("random:tiny", tmp_path)
    models = [{"name": "m", "source": str(directory)}]
    config = build_config({"models": models, "rank": {"device": "cpu", "task": "embed"}}, Path())
    (problem,) = find_refusals(config, {"m": directory})
    assert problem == "models[0] (m): a llama model cannot be served for 'embed'"


def test_what_a_gateway_refuses(find: Find, minilm_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((minilm_dir / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    config = build_config({"models": [{"name": "m", "source": str(tmp_path)}], "rank": {"device": "cpu"}}, Path())
    (problem,) = find_refusals(config, {"m": tmp_path})
    assert problem.startswith("models[0] (m): ")
    assert "tokenizer.json" in problem


def test_models_that_do_not_fit_on_the_gpus_together() -> None:
    models = [{"name": name, "source": "x", "memory_fraction": 0.6} for name in ("a", "b", "c")]
    config = build_config({"models": models, "rank": {"device": "cuda"}}, Path())
    check_placement(config, ["0", "1", "2"])
    with pytest.raises(PlacementError, match=r"c/0 needs 0.60 of 1 GPU.*lower memory_fraction"):
        check_placement(config, ["0", "1"])
    check_placement(config, [])  # that there is none is for the rank to say
