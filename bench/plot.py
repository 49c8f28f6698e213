"""A result file's ratios as a bar chart: `python -m bench.plot RESULT.json` writes RESULT.png."""

import sys
from pathlib import Path

from bench.report import Row, read

TAIL_METRICS = ("p90_ms", "p99_ms", "max_ms")  # in the tables; a chart shows one bar a case and peer


def plot(path: Path) -> Path:
    """Writes the chart beside `path`. Raises ValueError when the result compares with no peer."""
    from matplotlib.figure import Figure  # only here: the benchmarks work without it

    report = read(path)
    compared = [row for row in report.rows if row.ratio is not None and row.metric not in TAIL_METRICS]
    if not compared:
        raise ValueError(f"{path.name} has no ratios to plot")
    figure = Figure(figsize=(9, 0.24 * len(compared) + 1.5), layout="constrained")
    axes = figure.subplots()
    colours = ["tab:green" if ratio_of(row) >= 1 else "tab:red" for row in compared]
    bars = axes.barh([label(row) for row in compared], [ratio_of(row) for row in compared], color=colours)
    axes.bar_label(bars, [f"{ratio_of(row):.2f}x" for row in compared], padding=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("ours against the peer (over 1: ours is better)")
    axes.set_title(f"{report.what}, {report.hardware}, {report.date}")
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=120)
    return target


def ratio_of(row: Row) -> float:
    return row.ratio or 0.0


def label(row: Row) -> str:
    return f"{row.table}: {row.case}, {row.metric} vs {row.peer_name}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        print(plot(Path(sys.argv[1])))
    except ImportError:
        sys.exit("plotting needs matplotlib: pip install matplotlib")
    except (OSError, ValueError) as error:
        sys.exit(f"plot: {error}")
