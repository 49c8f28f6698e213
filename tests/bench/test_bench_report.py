"""Result files: ratios, both forms, and what they say of the run."""

from pathlib import Path

import pytest

from bench import report
from bench.report import Report, Row, compare


def make_report() -> Report:
    return Report(
        what="embeddings",
        hardware="cpu",
        machine={"cpu": "some processor", "cores": 2},
        commit="0123456789ab",
        command="python -m bench.run embeddings",
        versions={"python": "3.11"},
        date="2026-01-02",
    )


@pytest.mark.parametrize(
    ("metric", "ours", "peer", "ratio"),
    [("p50_ms", 5.0, 10.0, 2.0), ("passages_per_s", 90.0, 60.0, 1.5), ("load_s", 4.0, 2.0, 0.5)],
)
def test_a_ratio_over_one_means_that_ours_is_better(metric: str, ours: float, peer: float, ratio: float) -> None:
    assert compare("1", "case", metric, ours, peer, "other 1.0").ratio == ratio


def test_both_files_are_written_and_read_back(tmp_path: Path) -> None:
    made = make_report()
    made.rows = [compare("1", "1 × 16 tokens", "p50_ms", 4.5, 6.75, "other 1.0"), Row("1", "alone", "p50_ms", 1.0)]
    made.notes = ["a note"]
    path = report.write(made, tmp_path / "results")
    assert path.name == "2026-01-02_cpu_embeddings.json"
    assert report.read(path) == made
    text = path.with_suffix(".md").read_text()
    assert "| 1     | 1 × 16 tokens | p50_ms | 4.500 | 6.750 | other 1.0 | 1.500 |" in text
    assert "| 1     | alone         | p50_ms | 1.000 |       |           |       |" in text
    for fact in ("0123456789ab", "some processor", "python -m bench.run embeddings", "- a note"):
        assert fact in text


def test_columns_that_nobody_uses_are_left_out() -> None:
    lines = report.table_lines([Row("start-up", "total", "ms", 5123.4, goal="< 15,000")])
    assert lines[0].split("|")[1:-1] == [" table    ", " case  ", " metric ", " ours    ", " goal     "]
    assert "5,123.4" in lines[2]


def test_a_new_report_says_where_it_comes_from() -> None:
    made = report.new_report("x", "cpu")
    assert made.machine["cores"] >= 1
    assert made.versions["numpy"]
    assert made.commit
    assert "/" not in made.command.partition(" ")[0]
