"""Every architecture against transformers' own forward pass, on tiny random weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray

from tests.rose.driving import Driver, ragged_ids
from tests.rose.tiny_models import add_modules, bert_config, qwen3_config, save, xlm_roberta_config

LENGTHS = (1, 7, 64, 2, 31, 1, 12)  # one token, and as long as the model can
TOLERANCE = 1e-5


def hidden_states(model: torch.nn.Module, ids: list[int], **inputs: torch.Tensor) -> torch.Tensor:
    """transformers' last hidden states of one sequence, [n, H]."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), **inputs).last_hidden_state[0]


def pooled(hidden: torch.Tensor, pooling: str) -> NDArray[np.float32]:
    return {"cls": hidden[0], "mean": hidden.mean(0), "last_token": hidden[-1]}[pooling].numpy()


def check_rows(driver: Driver, sequences: list[list[int]], expected: list[NDArray[np.float32]], **columns: int) -> None:
    """Right in one batch, in the opposite order, and alone."""
    np.testing.assert_allclose(driver.vectors(sequences, **columns), expected, atol=TOLERANCE)
    np.testing.assert_allclose(driver.vectors(sequences[::-1], **columns), expected[::-1], atol=TOLERANCE)
    for sequence, row in zip(sequences, expected, strict=True):
        np.testing.assert_allclose(driver.vectors([sequence], **columns)[0], row, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last_token"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_bert(tmp_path: Path, pooling: str, num_threads: int) -> None:
    model = save(hf.BertModel, bert_config(), tmp_path)
    mode = {"cls": "cls", "mean": "mean", "last_token": "lasttoken"}[pooling]
    add_modules(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode": mode})
    driver = Driver(tmp_path, num_threads=num_threads)
    assert driver.facts.pooling == pooling
    sequences = ragged_ids(128, LENGTHS)
    check_rows(driver, sequences, [pooled(hidden_states(model, s), pooling) for s in sequences])
    driver.close()


def test_bert_token_types(tmp_path: Path) -> None:
    model = save(hf.BertModel, bert_config(), tmp_path)
    driver = Driver(tmp_path)
    sequences = ragged_ids(128, (9, 5, 20))
    starts = [4, -1, 0]
    types = [[0] * 4 + [1] * 5, [0] * 5, [1] * 20]
    expected = [
        pooled(hidden_states(model, s, token_type_ids=torch.tensor([t])), "mean")
        for s, t in zip(sequences, types, strict=True)
    ]
    np.testing.assert_allclose(driver.vectors(sequences, type_starts=starts), expected, atol=TOLERANCE)
    driver.close()


def test_xlm_roberta_positions_begin_after_padding(tmp_path: Path) -> None:
    model = save(hf.XLMRobertaModel, xlm_roberta_config(), tmp_path)
    driver = Driver(tmp_path)
    assert driver.facts.max_model_len == 64  # of 66 position embeddings
    sequences = ragged_ids(128, LENGTHS)
    expected = [pooled(hidden_states(model, s), "mean") for s in sequences]
    check_rows(driver, sequences, expected)
    check_rows(driver, sequences, expected, type_starts=0)  # there is one token type only
    driver.close()


@pytest.mark.parametrize("heads", [4, 2, 1], ids=lambda heads: f"{heads} kv heads")
def test_qwen3_causal(tmp_path: Path, heads: int) -> None:
    model = save(hf.Qwen3Model, qwen3_config(num_key_value_heads=heads), tmp_path)
    add_modules(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode_lasttoken": True})
    driver = Driver(tmp_path)
    sequences = ragged_ids(128, LENGTHS)
    check_rows(driver, sequences, [pooled(hidden_states(model, s), "last_token") for s in sequences])
    driver.close()


@pytest.mark.parametrize("marker", [{"is_causal": False}, {"use_bidirectional_attention": True}], ids=str)
def test_qwen3_bidirectional(tmp_path: Path, marker: dict[str, bool]) -> None:
    model = save(hf.Qwen3Model, qwen3_config(**marker), tmp_path)
    driver = Driver(tmp_path)
    sequences = ragged_ids(128, LENGTHS)
    expected = [
        # an explicit mask that hides nothing takes causality away
        pooled(hidden_states(model, s, attention_mask={"full_attention": torch.zeros(1, 1, len(s), len(s))}), "mean")
        for s in sequences
    ]
    check_rows(driver, sequences, expected)
    causal = save(hf.Qwen3Model, qwen3_config(), tmp_path / "causal")
    assert np.abs(pooled(hidden_states(causal, sequences[1]), "mean") - expected[1]).max() > 0.01  # it matters
    driver.close()


def logits(model: torch.nn.Module, ids: list[int], **inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), **inputs).logits[0]


@pytest.mark.parametrize("num_labels", [1, 3])
def test_bert_cross_encoder(tmp_path: Path, num_labels: int) -> None:
    model = save(hf.BertForSequenceClassification, bert_config(num_labels=num_labels), tmp_path)
    driver = Driver(tmp_path)
    assert (driver.facts.task, driver.facts.dimension) == ("score", num_labels)
    sequences, starts = ragged_ids(128, (9, 5, 20)), [4, 2, 7]
    types = [[int(i >= start) for i in range(len(s))] for s, start in zip(sequences, starts, strict=True)]
    raw = [logits(model, s, token_type_ids=torch.tensor([t])) for s, t in zip(sequences, types, strict=True)]
    expected = [(row.sigmoid() if num_labels == 1 else row).numpy() for row in raw]
    np.testing.assert_allclose(driver.vectors(sequences, type_starts=starts), expected, atol=TOLERANCE)
    driver.close()


def test_xlm_roberta_cross_encoder(tmp_path: Path) -> None:
    model = save(hf.XLMRobertaForSequenceClassification, xlm_roberta_config(num_labels=1), tmp_path)
    driver = Driver(tmp_path)
    sequences = ragged_ids(128, LENGTHS)
    check_rows(driver, sequences, [logits(model, s).sigmoid().numpy() for s in sequences])
    driver.close()


def test_qwen3_sequence_classification(tmp_path: Path) -> None:
    config = qwen3_config(num_labels=1, pad_token_id=0)
    model = save(hf.Qwen3ForSequenceClassification, config, tmp_path)
    driver = Driver(tmp_path)
    sequences = ragged_ids(128, LENGTHS)
    check_rows(driver, sequences, [logits(model, s).sigmoid().numpy() for s in sequences])
    driver.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_qwen3_reranker_is_the_probability_of_yes(tmp_path: Path, tied: bool) -> None:
    model = save(hf.Qwen3ForCausalLM, qwen3_config(tie_word_embeddings=tied), tmp_path)
    yes, no = 17, 42
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"yes": 17, "no": 42}}}')
    driver = Driver(tmp_path, task="score")
    sequences = ragged_ids(128, LENGTHS)
    expected = [logits(model, s)[-1, [yes, no]].softmax(-1)[:1].numpy() for s in sequences]
    check_rows(driver, sequences, expected)
    driver.close()
