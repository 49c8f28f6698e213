"""Drafts by batch size: what is set, else what was measured for the proposer and the kind of device."""

from pathlib import Path

import pytest

from rose.config import RankConfig, SpeculationConfig
from rose.decoder_loader import DecoderLoader
from rose.speculation import lengths
from rose.speculation.length_table import MEASURED
from tests.rose.tiny_lm import write_llama

TABLE = ((4, 3), (16, 1), (64, 0))


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MEASURED", {("n_gram", "cpu"): TABLE})


@pytest.mark.parametrize(
    ("settings", "device", "table", "most"),
    [
        ({}, "cpu", TABLE, 3),
        ({"num_draft_tokens": 5}, "cpu", TABLE, 3),
        ({"num_draft_tokens": 2}, "cpu", ((4, 2), (16, 1), (64, 0)), 2),
        ({"draft_lengths": [(8, 2)]}, "cpu", ((8, 2),), 2),
        ({"draft_lengths": []}, "cpu", (), 3),
        ({}, "cuda", (), 3),
        ({"proposer": "mtp"}, "cpu", (), 3),
    ],
)
def test_what_is_set_comes_before_what_was_measured(
    settings: dict[str, object], device: str, table: tuple[tuple[int, int], ...], most: int
) -> None:
    config = SpeculationConfig(**({"proposer": "n_gram", "num_draft_tokens": 3} | settings))  # type: ignore[arg-type]
    assert lengths.draft_lengths(config, device) == table
    assert lengths.max_draft_tokens(config, device) == most


def test_it_reaches_the_scheduler_as_a_models_facts(tmp_path: Path) -> None:
    config = RankConfig(device="cpu", num_threads=1, speculation=SpeculationConfig(proposer="n_gram"))
    facts = DecoderLoader("tiny", write_llama(tmp_path), config).facts
    assert (facts.draft_lengths, facts.max_draft_tokens) == (TABLE, 3)


def test_measured_tables_are_such() -> None:
    for table in MEASURED.values():
        assert lengths.find_table_problem(table, lengths.MAX_DRAFT_TOKENS) is None
