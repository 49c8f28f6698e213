"""What a row may ask for, and rows that fail alone."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from ipc.step import DTYPE_CODES, POOLING_CODES, STATUS_BAD_TOKEN, STATUS_NON_FINITE, STATUS_OK
from tests.rose.driving import Driver, ragged_ids
from tests.rose.tiny_models import add_modules, bert_config, qwen3_config, save

SEQUENCES = ragged_ids(128, (9, 1, 30, 4))
WIDTH = 48


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    save(hf.BertModel, bert_config(), directory)
    add_modules(directory, "Transformer", "Pooling", "Normalize")
    return directory


@pytest.fixture(scope="module")
def driver(model_dir: Path) -> Iterator[Driver]:
    driver = Driver(model_dir, num_threads=2)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def raw(driver: Driver) -> np.ndarray:
    """The mean-pooled vectors, not normalised."""
    return driver.vectors(SEQUENCES, normalize=0)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def read_bytes(driver: Driver, row_bytes: int, **columns: object) -> np.ndarray:
    offsets = np.arange(len(SEQUENCES)) * row_bytes
    arrays = driver.run(SEQUENCES, offsets=offsets, **columns)
    assert arrays["status"][: len(SEQUENCES)].tolist() == [STATUS_OK] * len(SEQUENCES)
    assert (arrays["values"][len(SEQUENCES) * row_bytes :] == 255).all(), "wrote past its rows"
    return arrays["values"][: len(SEQUENCES) * row_bytes].reshape(len(SEQUENCES), row_bytes)


def test_normalize_is_the_models_own_unless_said(driver: Driver, raw: np.ndarray) -> None:
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.01
    np.testing.assert_allclose(driver.vectors(SEQUENCES), unit(raw), atol=1e-6)
    np.testing.assert_allclose(driver.vectors(SEQUENCES, normalize=1), unit(raw), atol=1e-6)


def test_each_row_has_its_own_pooling(driver: Driver) -> None:
    codes = [POOLING_CODES["last_token"], POOLING_CODES["cls"], -1, POOLING_CODES["cls"]]
    mixed = driver.vectors(SEQUENCES, pooling=codes)
    for row, code in enumerate(codes):
        alone = driver.vectors([SEQUENCES[row]], pooling=code)
        np.testing.assert_allclose(mixed[row], alone[0], atol=1e-6)
    assert np.abs(mixed[0] - driver.vectors(SEQUENCES)[0]).max() > 0.01


def test_dimensions_cut_before_normalising(driver: Driver, raw: np.ndarray) -> None:
    rows = read_bytes(driver, 4 * 16, dimensions=16).view(np.float32)
    np.testing.assert_allclose(rows, unit(raw[:, :16]), atol=1e-6)
    rows = read_bytes(driver, 4 * 16, dimensions=16, normalize=0).view(np.float32)
    np.testing.assert_allclose(rows, raw[:, :16], atol=1e-6)


def test_int8_is_scaled_to_the_largest_value(driver: Driver, raw: np.ndarray) -> None:
    rows = read_bytes(driver, WIDTH, dtype=DTYPE_CODES["int8"]).view(np.int8)
    expected = raw / np.abs(raw).max(axis=1, keepdims=True) * 127
    assert np.abs(rows - expected).max() <= 0.501
    assert np.abs(rows).max(axis=1).tolist() == [127] * len(SEQUENCES)


def test_int8_of_a_model_trained_for_it_is_tanh(tmp_path: Path) -> None:
    model = save(hf.Qwen3Model, qwen3_config(vocab_size=128), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"qwen3"', '"bidirectional_pplx_qwen3"'))
    driver = Driver(tmp_path)
    assert not driver.facts.normalize
    raw = driver.vectors(SEQUENCES)
    rows = read_bytes(driver, WIDTH, dtype=DTYPE_CODES["int8"]).view(np.int8)
    assert np.abs(rows - np.tanh(raw) * 127).max() <= 0.501
    ids = torch.tensor([SEQUENCES[0]])
    with torch.inference_mode():
        hidden = model(ids, attention_mask={"full_attention": torch.zeros(1, 1, 9, 9)}).last_hidden_state
    np.testing.assert_allclose(raw[0], hidden[0].mean(0).numpy(), atol=1e-5)
    driver.close()


def test_binary_is_signs_least_significant_bit_first(driver: Driver, raw: np.ndarray) -> None:
    rows = read_bytes(driver, WIDTH // 8, dtype=DTYPE_CODES["binary"])
    assert (rows == np.packbits(raw >= 0, axis=1, bitorder="little")).all()
    rows = read_bytes(driver, 2, dtype=DTYPE_CODES["binary"], dimensions=12)  # the last byte is half full
    assert (rows == np.packbits(raw[:, :12] >= 0, axis=1, bitorder="little")).all()


def test_kinds_of_rows_mix_in_one_step(driver: Driver, raw: np.ndarray) -> None:
    """Rows of all dtypes at offsets with gaps and out of order."""
    dtypes = [DTYPE_CODES[name] for name in ("int8", "float32", "binary", "float32")]
    offsets = np.array([300, 0, 192, 200])
    arrays = driver.run(SEQUENCES, dtype=dtypes, dimensions=[-1, -1, -1, 8], offsets=offsets)
    values = arrays["values"]
    np.testing.assert_allclose(values[:192].view(np.float32), unit(raw[1]), atol=1e-6)
    assert (values[192:198] == np.packbits(raw[2] >= 0, bitorder="little")).all()
    np.testing.assert_allclose(values[200:232].view(np.float32), unit(raw[3, :8]), atol=1e-6)
    assert np.abs(values[300:348].view(np.int8) - raw[0] / np.abs(raw[0]).max() * 127).max() <= 0.501
    assert (values[348:] == 255).all()
    assert (values[232:300] == 255).all()


@pytest.mark.parametrize("bad_id", [128, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("row", [0, 2, 3])
def test_a_bad_token_fails_its_row_alone(driver: Driver, bad_id: int, row: int) -> None:
    good = driver.vectors(SEQUENCES)
    sequences = [list(sequence) for sequence in SEQUENCES]
    sequences[row][-1] = bad_id
    arrays = driver.run(sequences)
    expected = [STATUS_OK] * len(SEQUENCES)
    expected[row] = STATUS_BAD_TOKEN
    assert arrays["status"][: len(SEQUENCES)].tolist() == expected
    assert arrays["input_ids"][: sum(map(len, sequences))].tolist() == list(chain(*sequences)), "the slot was changed"
    good[row] = 0
    np.testing.assert_allclose(driver.read(arrays, len(SEQUENCES)), good, atol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "int8", "binary"])
def test_a_non_finite_row_fails_alone(model_dir: Path, tmp_path: Path, poison: float, dtype: str) -> None:
    for file in model_dir.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][3] = poison  # an id that no sequence has
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "modules.json").unlink()
    driver = Driver(tmp_path, num_threads=2)
    code = DTYPE_CODES[dtype]
    row_bytes = {"float32": 4 * WIDTH, "int8": WIDTH, "binary": WIDTH // 8}[dtype]
    good = read_bytes(driver, row_bytes, dtype=code).copy()
    sequences = [list(sequence) for sequence in SEQUENCES]
    sequences[1] = [3]
    sequences[2][7] = 3
    arrays = driver.run(sequences, dtype=code, offsets=np.arange(4) * row_bytes)
    assert arrays["status"][:4].tolist() == [STATUS_OK, STATUS_NON_FINITE, STATUS_NON_FINITE, STATUS_OK]
    good[[1, 2]] = 0
    assert (arrays["values"][: 4 * row_bytes].reshape(4, row_bytes) == good).all()
    driver.close()


def test_empty_and_overlong_sequences_are_refused(driver: Driver) -> None:
    with pytest.raises(AssertionError, match="empty sequence"):
        driver.launch([[7], [], [8]])
    with pytest.raises(AssertionError, match="65 tokens, over max_model_len"):
        driver.launch([[7] * 65])
    driver.vectors(SEQUENCES)
