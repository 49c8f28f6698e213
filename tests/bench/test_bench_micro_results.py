"""Result files made from what the GPU benchmarks wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def record(case: str, variant: str, us: float, **more: float | bool) -> dict[str, object]:
    return {"case": case, "variant": variant, "us": us, "error_vs_fp32": 2e-3, **more}


def write(path: Path, records: list[dict[str, object]]) -> Path:
    head = {"gpu": "G", "torch": "1", "triton": "2", "python": "3", "command": "/x/bench/micro/b.py --out /y --only d"}
    path.write_text(json.dumps({**head, "records": records}))
    return path


def run(tmp_path: Path, what: str, *files: Path) -> tuple[dict[str, object], str]:
    command = [sys.executable, "-m", "bench.micro.results", what, *map(str, files), "--date", "2026-01-02"]
    subprocess.run([*command, "--results", str(tmp_path), "--note", "hm"], cwd=ROOT, check=True, timeout=120)
    path = tmp_path / f"2026-01-02_h200_{what}.json"
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_kernels_and_layers(tmp_path: Path) -> None:
    kernels = write(
        tmp_path / "kernels.json",
        [
            record("norm", "triton", 2.0),
            record("norm", "flashinfer", 3.0),
            {**record("norm", "torch", 1.0), "error_vs_fp32": 0.5},
        ],
    )
    chain: list[dict[str, object]] = [
        {"case": "1x128", "variant": name, "ms": ms, "cosine": cosine}
        for name, ms, cosine in (("a", 2.0, 0.9999), ("b", 1.5, 0.9999), ("wrong", 1.0, 0.99))
    ]
    made, text = run(tmp_path, "kernels", kernels, write(tmp_path / "chain.json", chain))
    rows = made["rows"]
    assert isinstance(rows, list)
    assert [(r["ours"], r["peer"], r["peer_name"], r["ratio"]) for r in rows] == [
        (2.0, 3.0, "flashinfer", 1.5),
        (1.5, 2.0, "a", 1.333),
    ]
    assert made["command"] == "python -m bench.micro.b --only d"
    assert "- hm" in text


def test_the_table_of_several_files_has_each_point_of_the_last(tmp_path: Path) -> None:
    def measured(name: str, size: str, triton_us: float, fa3_us: float) -> Path:
        case, graph = f"d128 16:8 full {size}", {"prepare_us": 0.0, "other_lengths_error": 1e-3, "padding_finite": True}
        records = [record(case, "triton", triton_us, **graph), record(case, "fa3", fa3_us, **graph)]
        return write(tmp_path / name, [record(case, "triton 64/64/4/3", triton_us), *records])

    files = [measured("old.json", "50x512", 3.0, 5.0), measured("other.json", "100x512", 2.0, 3.0)]
    newest = measured("new.json", "50x512", 7.0, 6.0)
    newest.write_text(json.dumps({"details": json.loads(newest.read_text())}))  # as a result file has it
    command = [sys.executable, "-m", "bench.micro.attention", "--out", str(tmp_path), "--tables-of"]
    subprocess.run([*command, *map(str, [*files, newest])], cwd=ROOT, check=True, timeout=120)
    lines = (tmp_path / "choice_table.py").read_text().splitlines()
    rows = [line.strip() for line in lines if line.startswith("    (")]
    assert rows == ['(128, False, 50, 25600, "fa3"),', '(128, False, 100, 51200, "triton"),']


def test_attention_is_that_of_todays_tiles(tmp_path: Path) -> None:
    case, graph = "d128 16:8 full 1x128", {"prepare_us": 0.0, "other_lengths_error": 1e-3, "padding_finite": True}
    records = [
        record(case, "triton", 9.0, **graph),
        record(case, "triton 64/64/4/3", 4.0),
        record(case, "fa3", 7.0, **{**graph, "prepare_us": 70.0}),
    ]
    made, text = run(tmp_path, "attention", write(tmp_path / "attention.json", records))
    (row,) = made["rows"]  # type: ignore[misc]
    assert (row["ours"], row["peer"], row["ratio"]) == (4.0, 7.0, 1.75)
    assert "| d128 16:8 full | 1x128 | 4.0 | – | 7.0 | – | – | triton |" in text


def test_layers_against_those_before_and_against_better_ones(tmp_path: Path) -> None:
    now = [record("a", "default", 100.0, chosen=True), record("a", "attention 1/2", 97.0, chosen=False)]
    now += [record("b", "default", 51.0), record("b", "attention 1/2", 50.0, chosen=True), record("c", "default", 1.0)]
    before = [record("a", "default", 110.0, chosen=True), record("a", "attention 1/2", 90.0)]
    before += [record("b", "attention 3/4", 55.0, chosen=True), record("c", "default", 2.0, chosen=True)]
    files = write(tmp_path / "now.json", now), write(tmp_path / "before.json", before)
    rows = run(tmp_path, "decode-layer", *files)[0]["rows"]
    assert isinstance(rows, list)
    assert [(r["case"], r["ours"], r["peer"], r["peer_name"]) for r in rows] == [
        ("a", 100.0, 110.0, "before"),
        ("a", 100.0, 97.0, "attention 1/2"),
        ("b", 50.0, 55.0, "before"),
    ]
