"""Result files: rows of figures with the hardware, commit, command and versions they come from.

`bench/results/<date>_<hardware>_<what>.json` for machines, the same name with `.md` for people.
"""

import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "aiohttp",
    "numpy",
    "onnxruntime",
    "pyzmq",
    "sentence-transformers",
    "tokenizers",
    "torch",
    "uvloop",
    "vllm",
)
BUSY_CORES = 0.2
LOWER_IS_BETTER = ("_ms", "_us", "_s")


class Row(Struct, omit_defaults=True):
    """One figure. `ratio` > 1 means that ours is better; a figure without a peer has neither."""

    table: str
    case: str
    metric: str  # p50_ms, p99_ms, passages_per_s, …
    ours: float
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    gpu_ms: float | None = None
    goal: str | None = None


class Report(Struct):
    what: str
    hardware: str  # short, part of the file name: cpu, h200
    machine: dict[str, Any]
    commit: str
    command: str
    versions: dict[str, str]
    date: str
    rows: list[Row] = []
    notes: list[str] = []
    details: dict[str, Any] = {}  # settings tried, single repeats


def new_report(what: str, hardware: str) -> Report:
    return Report(
        what=what,
        hardware=hardware,
        machine=describe_machine(),
        commit=describe_commit(),
        command=describe_command(),
        versions=package_versions(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def compare(table: str, case: str, metric: str, ours: float, peer: float, peer_name: str) -> Row:
    """A row with its ratio, whichever way the metric is better."""
    lower = is_lower_better(metric)
    better, worse = (peer, ours) if lower else (ours, peer)
    return Row(table, case, metric, round(ours, 4), round(peer, 4), peer_name, round(better / worse, 3))


def is_lower_better(metric: str) -> bool:
    return metric.endswith(LOWER_IS_BETTER) and not metric.endswith("_per_s")


def write(report: Report, directory: Path = RESULTS) -> Path:
    """Writes both files and returns the path of the JSON one; a run of the same day and name is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{report.date}_{report.hardware}_{report.what}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    return path


def read(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)


def markdown(report: Report) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    lines = [
        f"# {report.what} on {report.hardware}, {report.date}",
        "",
        f"- command: `{report.command}`",
        f"- commit: {report.commit}",
        f"- machine: {machine}",
        f"- versions: {versions}",
        "",
        *table_lines(report.rows),
    ]
    if report.notes:
        lines += ["", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def table_lines(rows: list[Row]) -> list[str]:
    """The rows as a Markdown table; columns that no row uses are left out."""
    columns = ["table", "case", "metric", "ours", "peer", "peer_name", "ratio", "gpu_ms", "goal"]
    used = [name for name in columns if any(getattr(row, name) is not None for row in rows)]
    cells = [used, *([_cell(getattr(row, name)) for name in used] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(used))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.3f}" if isinstance(value, float) and abs(value) < 100 else _whole(value)


def _whole(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, and GPUs where there are any."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "busy_cores_before": busy_cores(),
    }
    query = ["nvidia-smi", "--query-gpu=name,memory.total,power.limit", "--format=csv,noheader"]
    if gpus := _output(query):
        found["gpus"] = gpus.splitlines()
    return found


def busy_cores(seconds: float = 0.5) -> float:
    """Cores at work now, before anything of ours runs; warns when they will be in the figures."""

    def spent() -> tuple[int, int]:
        values = [int(text) for text in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        return sum(values), values[3] + values[4]  # idle and waiting for disks

    before = spent()
    time.sleep(seconds)
    after = spent()
    idle = (after[1] - before[1]) / max(1, after[0] - before[0])
    busy = round((1 - idle) * (os.cpu_count() or 1), 2)
    if busy > BUSY_CORES:
        print(f"bench: {busy} cores are busy with other work; the figures will suffer", file=sys.stderr)
    return busy


def describe_commit() -> str:
    """The commit measured; `+` says that files of the project differed from it."""
    root = str(RESULTS.parent.parent)
    commit = _output(["git", "-C", root, "rev-parse", "--short=12", "HEAD"]) or "unknown"
    changed = _output(["git", "-C", root, "status", "--porcelain", "--", ".", ":!bench/results"])
    return commit + ("+" if changed else "")


def describe_command() -> str:
    """The command line as a reader would type it, without this machine's paths."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name.removesuffix('.__main__')}" if module else Path(sys.argv[0]).name
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join([program, *map(shlex.quote, words)])


def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
