"""The round-trip benchmark runs, both ways give the right bytes, and it leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_run_writes_its_result(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.micro.ipc_roundtrip", "--trips", "50", "--turns", "1", "--out"]
    done = subprocess.run([*command, "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.splitlines()[-1])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["metric"]) for row in rows] == [
        (case, metric) for case in ("2 KB", "200 KB", "1.6 MB") for metric in ("p50_us", "p99_us")
    ]
    assert all(row["ours"] > 0 and row["peer"] > 0 for row in rows)
    assert path.with_suffix(".md").exists()
