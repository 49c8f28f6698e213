"""Bulk encoding in one process."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import transformers as hf

from rose.config import RankConfig
from rose.offline import OfflineEncoder
from tests.rose.driving import Driver, ragged_ids
from tests.rose.tiny_models import bert_config, save


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    save(hf.BertModel, bert_config(), directory)
    return directory


@pytest.fixture(scope="module")
def encoder(model_dir: Path) -> Iterator[OfflineEncoder]:
    config = RankConfig(device="cpu", num_threads=2, max_num_batched_tokens=100, max_num_seqs=7)
    encoder = OfflineEncoder(model_dir, config)
    yield encoder
    encoder.close()


def test_many_steps_give_what_one_would(encoder: OfflineEncoder, model_dir: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 65, size=60).tolist() + [1] * 20
    sequences = ragged_ids(128, lengths)
    driver = Driver(model_dir)
    expected = np.concatenate([driver.vectors([sequence]) for sequence in sequences])
    np.testing.assert_allclose(encoder.encode(sequences), expected, atol=1e-5)
    driver.close()


def test_nothing_in_nothing_out(encoder: OfflineEncoder) -> None:
    assert encoder.encode([]).shape == (0, 48)


@pytest.mark.parametrize(
    ("sequence", "words"),
    [([], "sequence 1 has 0 tokens"), ([7] * 65, "1 to 64 are possible"), ([7, 128], "sequence 1 has a token outside")],
)
def test_bad_sequences_are_named_and_do_no_harm(encoder: OfflineEncoder, sequence: list[int], words: str) -> None:
    good = encoder.encode([[5, 6, 7]])
    with pytest.raises(ValueError, match=words):
        encoder.encode([[5, 6, 7], sequence, [8]])
    assert (encoder.encode([[5, 6, 7]]) == good).all()
