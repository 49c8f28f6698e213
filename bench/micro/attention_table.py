"""The table of the fastest attention backends (rose/attention/choice_table.py) from what was measured."""

import json
from pathlib import Path
from typing import Any

from bench.micro.attention_points import Point, points
from rose.kernels.ragged_attention import default_tiles

TOLERANCE = 1e-2
CHOSEN_FROM = ("triton", "fa2", "fa3")  # flash4 is a pre-release of its own; a configuration may name it
LATENCY_TOKENS = 4096  # up to here a step is waited for, and the host's planning with it
LAYERS = {32: 6, 64: 24, 128: 28}

TABLE_HEAD = '''"""The fastest attention backend, measured on an H200: (head_dim, causal, sequences, tokens, backend).

Written by `python -m bench.micro.attention`; do not edit by hand.
"""

TABLE: tuple[tuple[int, bool, int, int, str], ...] = (
'''


def records_of(path: Path) -> list[dict[str, Any]]:
    """Of what the benchmark wrote, or of a result file made of that."""
    document = json.loads(path.read_text())
    found: list[dict[str, Any]] = document["records"] if "records" in document else document["details"]["records"]
    return found


def latest(files: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The records of each case from the last of `files` that measured it: kernels change."""
    cases = {record["case"]: records for records in files for record in records if "error" not in record}
    return [record for case, records in cases.items() for record in records if record["case"] == case]


def best(point: Point, records: list[dict[str, Any]]) -> str | None:
    """The backend with the least time for a whole step: all layers, and for short steps the planning before them.

    Not one that was wrong here, or through which NaN of one sequence reached another.
    """
    here = {r["variant"]: r for r in records if r["case"] == point.name}
    right = [
        r for name in CHOSEN_FROM
        if (r := here.get(name)) is not None and "prepare_us" in r and r["error_vs_fp32"] < TOLERANCE
        and r["other_lengths_error"] < TOLERANCE and r["padding_finite"] and r.get("bad_neighbour_contained", True)
    ]  # fmt: skip
    if not right:
        return None
    planning = 1 if point.num_tokens <= LATENCY_TOKENS else 0

    def step_us(record: dict[str, Any]) -> float:
        return float(_as_launched_now(point, record, here)["us"] * LAYERS[point.head_dim]
                     + planning * record["prepare_us"])  # fmt: skip

    return str(min(right, key=step_us)["variant"])


def _as_launched_now(point: Point, record: dict[str, Any], here: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Our kernel with the tiles it takes today: its default at the time of the record may have been another."""
    if record["variant"] != "triton":
        return record
    tiles = default_tiles(point.head_dim, point.num_tokens, point.num_seqs, point.causal)
    return here.get(f"triton {'/'.join(map(str, tiles))}", record)


def write_table(directory: str | None, records: list[dict[str, Any]]) -> str:
    lines = [
        f'    ({p.head_dim}, {p.causal}, {p.num_seqs}, {p.num_tokens}, "{winner}"),'
        for p in points()
        if (winner := best(p, records)) is not None
    ]
    text = TABLE_HEAD + "\n".join(lines) + "\n)\n"
    if directory is not None:
        (Path(directory) / "choice_table.py").write_text(text)
    return text
