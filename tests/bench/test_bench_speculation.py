"""Drafts of a chosen acceptance are accepted as often as asked, whoever drafts; and what is made of the figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.decode_loop import DecodeLoop, random_prompts
from bench.micro.draft_lengths import Found, best_lengths, lengths, table_module
from bench.micro.speculation_categories import Counted, choose, read_questions
from bench.micro.speculation_results import floor_ms, report_of
from bench.micro.speculation_step import LENGTHS, SAYS, STEPS, Options, cases, rank_spec
from bench.ranks import Ranks, RankSpec, ranks
from bench.report import write as report_file
from rose.speculation import registry
from scheduler.llm.figures import Figures


@pytest.fixture(autouse=True)
def _unsteered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark registers in its process is gone after a test."""
    monkeypatch.setattr(registry, "PROPOSERS", registry.PROPOSERS)


def spec(tmp_path: Path, part: str, size: int = 1) -> RankSpec:
    return rank_spec(Options("tiny", part, size, tmp_path, tmp_path, "cpu", True))


def accepted_length(model: Ranks, length: int, acceptance: float) -> float:
    model.accept(acceptance)
    loop = DecodeLoop(model, random_prompts(4, 24, 512, seed=length), max_tokens=600, draft_length=length)
    found = loop.decode(8)
    loop.close()
    assert found.itl_ms == pytest.approx(found.step_ms / found.accepted_length, rel=0.5)
    return found.accepted_length


@pytest.mark.parametrize("part", ["mtp", "draft"])
def test_drafts_are_accepted_as_often_as_asked(tmp_path: Path, part: str) -> None:
    """Left alone, all of them: model and drafts always say the same."""
    with ranks(spec(tmp_path, part)) as model:
        assert accepted_length(model, 2, 1.0) == 3.0
        assert accepted_length(model, 2, 0.0) == 1.0
        # 24 steps of 4 sequences: a deviation of 0.09
        assert accepted_length(model, 2, 0.6) == pytest.approx(1 + 0.6 + 0.36, abs=0.25)


def test_a_proposer_that_is_not_steered_is_right_by_itself(tmp_path: Path) -> None:
    alone = spec(tmp_path, "mtp")
    with ranks(RankSpec(alone.directory, alone.config)) as model:
        assert accepted_length(model, 3, 0.0) == 4.0


@pytest.mark.long
@pytest.mark.parametrize("part", ["mtp", "leader"])
def test_two_ranks_accept_what_one_does(tmp_path: Path, part: str) -> None:
    with ranks(spec(tmp_path, part)) as model:
        expected = accepted_length(model, 3, 0.8)
    with ranks(spec(tmp_path, part, size=2)) as model:
        assert accepted_length(model, 3, 0.8) == expected


def test_a_sequence_too_short_for_the_measurement_is_said(tmp_path: Path) -> None:
    with ranks(spec(tmp_path, "none")) as model:
        loop = DecodeLoop(model, random_prompts(2, 16, 512, seed=1), max_tokens=20)
        with pytest.raises(RuntimeError, match="ended before the measurement did"):
            loop.decode(10)
        loop.close()


def test_cases_begin_with_what_has_goals_and_lack_none() -> None:
    found = cases("mtp", quick=False)
    assert [(case.batch, case.length, case.acceptance) for case in found[:2]] == [(1, 1, 0.8), (1, 3, 0.8)]
    wanted = {(batch, length, 0.8) for batch in STEPS for length in LENGTHS["mtp"]} | {(1, 1, 0.6), (1, 1, 0.9)}
    assert {(case.batch, case.length, case.acceptance) for case in found} == wanted | {(b, 0, 1.0) for b in STEPS}
    assert len({*found}) == len(found)
    assert [case.batch for case in cases("none", quick=False)[: len(STEPS)]] == list(STEPS)
    assert SAYS < 512


def test_what_pays_by_batch_size() -> None:
    plain = {1: 4.0, 4: 4.2, 16: 5.0, 64: 8.0}
    times = {
        (1, 1): 3.0,
        (1, 3): 2.0,
        (4, 1): 3.0,
        (4, 3): 2.5,
        (16, 1): 4.0,
        (16, 3): 4.5,
        (64, 1): 7.9,
        (64, 3): 12.0,
    }
    assert best_lengths(plain, times) == [(4, 3), (16, 1), (64, 0)]  # one percent is none
    assert best_lengths({1: 1.0}, times) == [(1, 0)]


def record(what: str, **fields: Any) -> dict[str, Any]:
    return {"what": what} | fields


def decoded(batch: int, length: int, acceptance: float, step_ms: float, in_flight: int = 2) -> dict[str, Any]:
    expected = sum(acceptance**place for place in range(length + 1))
    return record(
        "decode", batch=batch, length=length, acceptance=acceptance, in_flight=in_flight, step_ms=step_ms,
        itl_ms=step_ms / expected, expected_length=expected,
    )  # fmt: skip


def write(directory: Path, part: str, records: list[dict[str, Any]]) -> None:
    document = {"shape": "llama-8b", "part": part, "size": 1, "records": records}
    (directory / f"speculation_llama-8b_{part}.json").write_text(json.dumps(document))


def test_the_result_file(tmp_path: Path) -> None:
    first = record("first token", prompt=512, ttft_ms=10.0)
    write(tmp_path, "none", [decoded(1, 0, 1.0, 4.5), first])
    write(
        tmp_path,
        "mtp",
        [
            record("memory", kv_bytes=131072, draft_kv_bytes=4096),
            decoded(1, 1, 0.8, 5.0),
            decoded(1, 0, 1.0, 4.8),
            decoded(1, 1, 0.8, 5.5, in_flight=1),
            decoded(1, 1, 0.6, 5.0),
            first | {"ttft_ms": 11.0},
        ],
    )
    write(tmp_path, "head", [record("head", batch=1, length=1, all_us=120.0, one_us=110.0)])
    found = Found.of_folder(tmp_path, "llama-8b")
    report = report_of(found, "h200", commit="abc", date="2026-12-01", notes=["more"])
    rows = {(row.table, row.case): row for row in report.rows}
    head = rows["time between tokens", "1 x mtp k=1 at 0.8"]
    assert (head.ours, head.peer, head.ratio, head.goal) == (pytest.approx(5 / 1.8, abs=1e-4), 4.5, 1.62, ">= 1.55x")
    assert rows["time between tokens", "1 x mtp k=1 at 0.6"].goal is None
    assert rows["state kept, no drafts", "1 x mtp"].ours == 4.8
    waiting = rows["pass that closes a step", "1 x k=1"]
    assert (waiting.peer, waiting.peer_name) == (610.0, "accepted alone, waiting")
    assert rows["memory of a token", "mtp"].ratio == 32.0
    assert rows["time to first token", "512 tokens, mtp"].ratio == pytest.approx(0.909)
    assert rows["step without drafts", "1 sequences"].peer == pytest.approx(floor_ms("llama-8b", 1, 1), abs=1e-4)
    assert report.what == "speculation-llama-8b"
    again = Found.of_report(report_file(report, tmp_path))
    assert lengths(again, 0.8) == {"mtp": [(1, 1)]}
    assert lengths(again, 0.05) == {"mtp": [(1, 0)]}
    module: dict[str, Any] = {}
    exec(table_module(lengths(again, 0.8), "this test"), module)
    assert module["MEASURED"] == {("mtp", "cuda"): ((1, 1),)}


def test_floors_are_the_bytes_of_one_rank() -> None:
    """16 GB of an 8B's weights, less the embedding; half of a 70B's."""
    assert floor_ms("llama-8b", 1, 1) == pytest.approx(15.0e9 / 4.3e12 * 1e3, rel=0.02)
    assert floor_ms("llama-70b", 2, 1) == pytest.approx(16.2, rel=0.02)


def test_questions_by_category(tmp_path: Path) -> None:
    lines = [
        {"category": name, "turns": [f"{name} {index}", "?"]} for index in range(2) for name in ("qa", "math", "stem")
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_questions(path) == {"qa": ["qa 0", "qa 1"], "mt_bench": ["math 0", "stem 0", "math 1", "stem 1"]}
    prompts = [[index] * length for index, length in enumerate((5, 2000, 5, 5, 5))]
    assert [prompt[0] for prompt in choose(prompts, 2)] == [0, 3]
    assert len(choose(prompts, 9)) == 4


def test_tokens_of_a_step_count_every_step() -> None:
    counted, figures = Counted(), Figures()
    figures.num_generated_tokens, figures.num_accepted_tokens = 30, 10
    figures.num_drafts, figures.num_draft_tokens = 5, 20
    counted.add(1, figures)
    assert counted.figures() == {
        "tokens_per_step": 1.5, "accepted_length": 3.0, "steps_with_drafts": 0.25, "accepted_share": 0.5,
    }  # fmt: skip
