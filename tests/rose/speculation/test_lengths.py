"""Drafts by batch size: what is set, else what was measured for the proposer and the kind of device."""

from pathlib import Path

import msgspec
import pytest

from ipc.types import Count, ModelFacts
from rose.config import RankConfig, SpeculationConfig
from rose.decoder_loader import DecoderLoader
from rose.speculation import lengths
from rose.speculation.length_table import MEASURED
from rose.speculation.registry import PROPOSERS
from scheduler.config import SchedulerConfig
from scheduler.llm.draft_lengths import keeps_draft
from scheduler.llm.planner import GeneratePlanner
from scheduler.quarantine import Quarantine
from scheduler.stats import Stats
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


@pytest.mark.parametrize("table", [(), ((1, 3), (5, 2), (40, 1)), ((3, 0), (20, 4)), ((90, 3),)])
@pytest.mark.parametrize("tokens", [20, 64, 200])
def test_drafts_of_a_step_are_what_the_scheduler_plans(table: tuple[tuple[int, int], ...], tokens: int) -> None:
    facts = ModelFacts(
        name="", architecture="", task="generate", vocab_size=50, max_model_len=64, dimension=1, max_num_seqs=60,
        max_num_batched_tokens=tokens, num_blocks=400, draft_lengths=table, max_draft_tokens=3,
    )  # fmt: skip
    composer = GeneratePlanner(facts, SchedulerConfig(), Stats("tiny/0"), Quarantine(9))._composer
    for count in range(1, 61):
        planned = composer._draft_length_of(count, tokens), keeps_draft(facts, count)
        assert lengths.drafts_of_step(facts, count) == planned


def test_measured_tables_are_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of proposers and devices that there are; in use where a configuration says nothing."""
    assert MEASURED, "there are measurements of a GPU"
    monkeypatch.setattr(lengths, "MEASURED", MEASURED)
    for (proposer, device), table in MEASURED.items():
        assert proposer in set(PROPOSERS) - {"none"}
        assert device in ("cpu", "cuda")
        assert lengths.find_table_problem(table, lengths.MAX_DRAFT_TOKENS) is None
        config = SpeculationConfig(proposer=proposer, num_draft_tokens=lengths.MAX_DRAFT_TOKENS)  # type: ignore[arg-type]
        assert lengths.draft_lengths(config, device) == table
        assert lengths.max_draft_tokens(config, device) > 0


@pytest.mark.parametrize(
    "table", [((0, 3),), ((4, 3), (4, 1)), ((8, 1), (4, 3)), ((4, -1),), ((4, 17),), ((1 << 31, 3),)]
)
def test_other_tables_are_none(table: tuple[tuple[int, int], ...]) -> None:
    assert lengths.find_table_problem(table, lengths.MAX_DRAFT_TOKENS)


def test_the_largest_batch_is_one_that_facts_can_carry() -> None:
    table = ((lengths.MAX_BATCH, 3),)
    assert lengths.find_table_problem(table, lengths.MAX_DRAFT_TOKENS) is None
    assert msgspec.convert([[lengths.MAX_BATCH, 3]], tuple[tuple[Count, Count], ...]) == table
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(lengths.MAX_BATCH + 1, Count)
