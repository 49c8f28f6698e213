"""The real all-MiniLM-L6-v2 against sentence-transformers, fp32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from tests.rose.driving import Driver

TEXTS = [
    "hi",
    "What is the capital of France?",
    "Die Hauptstadt Frankreichs ist Paris, eine Stadt an der Seine mit über zwei Millionen Einwohnern.",
    "東京は日本の首都です。",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم",
    "😀🚀 to the moon 👩‍👩‍👧‍👦",
    "   ",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "x",
    "dog " * 254,  # 256 tokens: as long as the model may
]


@pytest.fixture(scope="module")
def driver(minilm_dir: Path) -> Iterator[Driver]:
    driver = Driver(minilm_dir, num_threads=2)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def sequences(minilm_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]


@pytest.fixture(scope="module")
def expected(minilm_dir: Path) -> NDArray[np.float32]:
    model = SentenceTransformer(str(minilm_dir), device="cpu")
    return np.stack([model.encode(text) for text in TEXTS])  # one by one: nothing padded


def test_facts_come_from_files_alone(driver: Driver) -> None:
    facts = driver.facts
    assert (facts.task, facts.dimension, facts.vocab_size, facts.max_model_len) == ("embed", 384, 30522, 256)
    assert (facts.pooling, facts.normalize, facts.dtype) == ("mean", True, "float32")


def test_alone(driver: Driver, sequences: list[list[int]], expected: NDArray[np.float32]) -> None:
    rows = np.concatenate([driver.vectors([sequence]) for sequence in sequences])
    assert (rows * expected).sum(1).min() >= 0.99999


def test_in_one_batch(driver: Driver, sequences: list[list[int]], expected: NDArray[np.float32]) -> None:
    assert max(map(len, sequences)) == 256
    assert (driver.vectors(sequences) * expected).sum(1).min() >= 0.99999


@pytest.mark.parametrize("seed", range(4))
def test_in_any_mix(driver: Driver, sequences: list[list[int]], expected: NDArray[np.float32], seed: int) -> None:
    order = np.random.default_rng(seed).choice(len(TEXTS), size=6).tolist()
    rows = driver.vectors([sequences[i] for i in order])
    assert (rows * expected[order]).sum(1).min() >= 0.99999


def test_short_beside_long(driver: Driver, sequences: list[list[int]], expected: NDArray[np.float32]) -> None:
    for order in ([0, 10], [10, 0]):
        rows = driver.vectors([sequences[i] for i in order])
        assert (rows * expected[order]).sum(1).min() >= 0.99999
