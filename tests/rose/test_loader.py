"""Weights: shards, prefixes, old names, and what is missing or too much."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from rose.models.config import ModelError
from tests.rose.driving import Driver, ragged_ids
from tests.rose.tiny_models import bert_config, qwen3_config, save

SEQUENCES = ragged_ids(128, (9, 3))


def vectors(directory: Path) -> np.ndarray:
    driver = Driver(directory)
    rows = driver.vectors(SEQUENCES)
    driver.close()
    return rows


def rewrite(directory: Path, change: object) -> None:
    """Applies `change` to the dictionary of weights."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    change(weights)  # type: ignore[operator]
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)


@pytest.fixture
def bert_dir(tmp_path: Path) -> Path:
    save(hf.BertModel, bert_config(), tmp_path)
    return tmp_path


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    save(hf.Qwen3Model, qwen3_config(), tmp_path / "whole")
    save(hf.Qwen3Model, qwen3_config(), tmp_path / "shards", shard="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert (vectors(tmp_path / "shards") == vectors(tmp_path / "whole")).all()
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"safetensors is missing"):
        vectors(tmp_path / "shards")


def test_prefixes_old_names_and_unneeded_heads(bert_dir: Path) -> None:
    expected = vectors(bert_dir)

    def as_masked_language_model(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            weights["bert." + old] = weights.pop(name)
        weights["cls.predictions.bias"] = torch.zeros(128)
        weights["bert.embeddings.position_ids"] = torch.arange(64)[None]

    rewrite(bert_dir, as_masked_language_model)
    assert (vectors(bert_dir) == expected).all()


def test_rotary_buffers_of_old_files_are_left_alone(tmp_path: Path) -> None:
    save(hf.Qwen3Model, qwen3_config(), tmp_path)
    expected = vectors(tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert (vectors(tmp_path) == expected).all()


def test_missing_tensors_are_named(bert_dir: Path) -> None:
    rewrite(bert_dir, lambda weights: weights.pop("encoder.layer.1.attention.self.key.weight"))
    with pytest.raises(ModelError, match=r"lack encoder\.layer\.1\.attention\.self\.query_key_value\.weight"):
        vectors(bert_dir)


def test_unexpected_tensors_are_named(bert_dir: Path) -> None:
    rewrite(bert_dir, lambda weights: weights.update({"adapter.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"holds 'adapter\.weight', which this architecture does not have"):
        vectors(bert_dir)


def test_shapes_must_fit(bert_dir: Path) -> None:
    name = "encoder.layer.0.output.dense.weight"
    rewrite(bert_dir, lambda weights: weights.update({name: torch.zeros(48, 95)}))
    with pytest.raises(ModelError, match=r"output\.dense\.weight has shape \[48, 95\], expected \[48, 96\]"):
        vectors(bert_dir)


def test_damaged_and_absent_files(bert_dir: Path) -> None:
    file = bert_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="is damaged"):
        vectors(bert_dir)
    file.unlink()
    with pytest.raises(ModelError, match="as safetensors or as model"):
        vectors(bert_dir)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(bert_dir: Path, index: str) -> None:
    (bert_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is damaged"):
        vectors(bert_dir)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_come_close(bert_dir: Path, dtype: str) -> None:
    expected = vectors(bert_dir)
    driver = Driver(bert_dir, dtype=dtype)
    rows = driver.vectors(SEQUENCES)
    cosine = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() > 0.999
    assert not np.array_equal(rows, expected)
    driver.close()
