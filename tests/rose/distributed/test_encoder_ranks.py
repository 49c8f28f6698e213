"""Vectors and scores of two ranks against one, for every family of encoders."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transformers as hf

from tests.rose.distributed.ranks import Ranks
from tests.rose.driving import Driver, ragged_ids
from tests.rose.tiny_models import SIZES, add_modules, bert_config, qwen3_config, save, xlm_roberta_config

LENGTHS = (1, 17, 5, 30)


def write_bert(directory: Path) -> None:
    save(hf.BertModel, bert_config(), directory)
    add_modules(directory, "Transformer", "Pooling", "Normalize")


def write_bert_classifier(directory: Path) -> None:
    save(hf.BertForSequenceClassification, bert_config(num_labels=3), directory)


def write_xlm_roberta(directory: Path) -> None:
    save(hf.XLMRobertaForSequenceClassification, xlm_roberta_config(num_labels=1), directory)


def write_qwen3(directory: Path) -> None:
    save(hf.Qwen3Model, qwen3_config(), directory)
    add_modules(directory, "Transformer", "Pooling", pooling={"pooling_mode_lasttoken": True})


@pytest.mark.parametrize("write", [write_bert, write_bert_classifier, write_xlm_roberta, write_qwen3])
def test_two_ranks_give_what_one_gives(ranks: Ranks, tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    rows = ragged_ids(SIZES["vocab_size"], LENGTHS)
    one, two = Driver(tmp_path), Driver(tmp_path, runner=(runner := ranks.load(tmp_path)), slots=runner.slots)
    np.testing.assert_allclose(two.vectors(rows), one.vectors(rows), atol=1e-5)
    bad = two.run([*rows, [1, SIZES["vocab_size"]]])
    assert bad["status"][: len(rows) + 1].tolist() == [0] * len(rows) + [1]
    one.close()
    two.close()


def test_ranks_with_different_plans_are_found_out(ranks: Ranks, tmp_path: Path) -> None:
    write_bert(tmp_path)
    two = Driver(tmp_path, runner=(runner := ranks.load(tmp_path)), slots=runner.slots)
    two.run([[5, 6, 7]])
    ranks.tell(1, "take_for", "num_seqs", 3)
    with pytest.raises(AssertionError, match="Diverged: rank 0 at step 2: marks of the plan"):
        two.run([[5, 6, 7]])
