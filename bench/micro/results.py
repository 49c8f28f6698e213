"""Result files of the kernel and attention benchmarks, from the JSON files that they wrote on a GPU. Needs no GPU.

    python -m bench.micro.results kernels KERNELS.json [LAYER_CHAIN.json] [--commit C] [--note TEXT …]
    python -m bench.micro.results attention ATTENTION.json … [--commit C] [--note TEXT …]
    python -m bench.micro.results few-rows FEW_ROWS.json … [--commit C] [--note TEXT …]
    python -m bench.micro.results decode-layer DECODE_LAYER.json [OF_A_COMMIT_BEFORE.json] [--commit C] [--note TEXT …]

The `.md` shows the rows of each case side by side; the `.json` holds every variant that was tried (`details`).
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.micro.attention_points import Point, points
from bench.micro.attention_table import best
from bench.micro.few_rows import PRODUCTS
from bench.report import RESULTS, Report, Row, compare, markdown, table_lines, write
from rose.kernels.few_rows import block_of
from rose.kernels.ragged_attention import default_tiles

Record = dict[str, Any]
WRONG = 5e-3  # relative error against float32; bf16 rounding alone makes up to 4e-3
PEERS = {
    "fa2": "flashinfer fa2",
    "fa3": "flashinfer fa3",
    "flash4": "flash-attn-4",
    "torch cudnn": "cudnn (equal lengths)",
}


def right(record: Record) -> bool:
    return "error" not in record and bool(record.get("error_vs_fp32", 0.0) < WRONG and record.get("cosine", 1) > 0.999)


def by_case(records: list[Record]) -> dict[str, dict[str, Record]]:
    cases: dict[str, dict[str, Record]] = {}
    for record in records:
        cases.setdefault(record["case"], {})[record["variant"]] = record
    return cases


def attention_rows(records: list[Record]) -> Iterator[tuple[Row, Point, str]]:
    """Our kernel with the tiles it takes, against every other backend. (row, point, backend chosen there)"""
    cases = by_case(records)
    for point in points():
        here = {name: record for name, record in cases.get(point.name, {}).items() if right(record)}
        tiles = default_tiles(point.head_dim, point.num_tokens, point.num_seqs, point.causal)
        ours = here.get(f"triton {'/'.join(map(str, tiles))}") or here.get("triton")
        if ours is None:
            continue
        table, _, case = point.name.rpartition(" ")
        for name, label in PEERS.items():
            if name in here:
                row = compare(table, case, "gpu_us", ours["us"], here[name]["us"], label)
                yield row, point, best(point, records) or ""


def attention_lines(found: list[tuple[Row, Point, str]]) -> list[str]:
    """One line a point: our time, everybody else's, who is chosen."""
    labels = list(PEERS.values())
    lines = [f"| heads, mask | sequences | triton | {' | '.join(labels)} | chosen |", "|---" * (len(labels) + 4) + "|"]
    for name in dict.fromkeys(point.name for _, point, _ in found):
        rows = {row.peer_name: (row, chosen) for row, point, chosen in found if point.name == name}
        row, chosen = next(iter(rows.values()))
        cells = [f"{rows[label][0].peer:,.1f}" if label in rows else "–" for label in labels]
        lines.append(f"| {row.table} | {row.case} | {row.ours:,.1f} | {' | '.join(cells)} | {chosen} |")
    return lines


def kernel_rows(records: list[Record]) -> Iterator[Row]:
    """Our kernels against the best of the others; products: cuBLAS against the best of what was tried instead."""
    for case, found in by_case(records).items():
        good = [record for record in found.values() if right(record)]
        gemm = case.startswith("gemm")
        base = "cublas + kernels" if gemm else "triton"
        others = [r for r in good if not r["variant"].startswith(base) and not r["variant"].endswith("alone")]
        if base in found and right(found[base]) and others:
            other = min(others, key=lambda r: float(r["us"]))
            table = "product" if gemm else case.split()[0]
            yield compare(table, case, "gpu_us", found[base]["us"], other["us"], other["variant"])


def chain_rows(records: list[Record]) -> Iterator[Row]:
    """The fastest way through 28 layers against each of the others, both with PDL or without as is better."""
    for case, found in by_case(records).items():
        good = sorted((r for r in found.values() if right(r)), key=lambda r: float(r["ms"]))
        for other in good[1:4]:
            name = f"{case}: {good[0]['variant']}"
            yield compare("28 layers", name, "gpu_ms", good[0]["ms"], other["ms"], other["variant"])


def few_rows_rows(records: list[Record]) -> Iterator[Row]:
    """Of every product that has a block: the time with that one against the time before."""
    times = {(r["product"], r["rows"], r["way"]): r["us"] for r in records if "us" in r}
    products = {product.name: product for product in PRODUCTS}
    for name, num_rows in dict.fromkeys((record["product"], record["rows"]) for record in records):
        product = products[name]
        block = block_of(num_rows, product.columns, product.depth, gated=product.gated, norm=product.has_norm)
        if block is not None and (name, num_rows, way := "/".join(map(str, block[:5]))) in times:
            ours, before = times[name, num_rows, way], times[name, num_rows, "before"]
            case = f"{name}, {num_rows} rows"
            yield compare("products of few rows", case, "gpu_us", ours, before, "library and kernels around it")


def layer_rows(records: list[Record], before: list[Record]) -> Iterator[Row]:
    """What is chosen against what was, and against the best of the others where that is better by 2 %."""
    was = {r["case"]: r["us"] for r in before if "us" in r and r.get("chosen")}
    for case, found in by_case([r for r in records if "us" in r]).items():
        ours = next((r["us"] for r in found.values() if r.get("chosen")), None)
        if ours is None:
            continue
        best = min(found.values(), key=lambda r: float(r["us"]))
        if case in was:
            yield compare("a layer of a decode step", case, "gpu_us", ours, was[case], "before")
        if best["us"] < 0.98 * ours:
            yield compare("a layer of a decode step", case, "gpu_us", ours, best["us"], best["variant"])


def report_of(what: str, documents: list[Record], commit: str, date: str, notes: list[str]) -> Report:
    first = documents[0]
    command = "; ".join(dict.fromkeys(_command(d["command"]) for d in documents))
    versions = {name: first[name] for name in ("python", "torch", "triton")}
    records = [without_paths(record) for document in documents for record in document["records"]]
    return Report(what, "h200", {"gpus": [first["gpu"]]}, commit, command, versions, date, [], notes,
                  {"records": records})  # fmt: skip


def without_paths(record: Record) -> Record:
    """The record, its error free of the paths of the machine."""
    return {**record, "error": re.sub(r"/\S*/", "", record["error"])} if "error" in record else record


def _command(line: str) -> str:
    """As typed, without the machine's paths."""
    program, *arguments = line.split()
    kept = [x for x in arguments if x != "--no-compile"]
    if "--out" in kept:
        del kept[kept.index("--out") : kept.index("--out") + 2]
    return " ".join(["python -m", f"bench.micro.{Path(program).stem}", *kept])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kernels", "attention", "few-rows", "decode-layer"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--date", required=True, help="of the run")
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in args.files]
    report = report_of(args.what, documents, args.commit, args.date, args.note)
    records = report.details["records"]
    if args.what == "kernels":
        report.rows = [*kernel_rows([r for r in records if "us" in r]), *chain_rows([r for r in records if "ms" in r])]
        print(write(report, args.results))
        return
    if args.what == "few-rows":
        report.rows = list(few_rows_rows(records))
        print(write(report, args.results))
        return
    if args.what == "decode-layer":
        before = [record for document in documents[1:] for record in document["records"]]
        report.rows = list(layer_rows(documents[0]["records"], before))
        print(write(report, args.results))
        return
    found = list(attention_rows(records))
    report.rows = [row for row, _, _ in found]
    path = write(report, args.results)
    text = markdown(report).replace("\n".join(table_lines(report.rows)), "\n".join(attention_lines(found)))
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
