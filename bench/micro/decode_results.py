"""The result file of a decode step, from the JSON file that bench.micro.decode_step wrote on a GPU. Needs no GPU.

    python -m bench.micro.decode_results DECODE_STEP.json --date DATE [--commit C] [--note TEXT …]

Times of a step against vLLM's, prompts likewise, attention of our launch against FlashInfer's; the `.json` holds all
that was measured (`details`).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.micro.decode_attention import is_right
from bench.report import RESULTS, Report, Row, compare, write

Record = dict[str, Any]
PLAIN = "graph of library kernels"


def records(document: Record, part: str) -> list[Record]:
    found: list[Record] = document.get(part, {}).get("result", [])
    return found


def step_rows(document: Record) -> Iterator[Row]:
    for record in records(document, "step"):
        if "queued_ms" in record:
            case = f"{record['rows']} rows {record['sampling']}"
            yield compare("step, two in flight", case, "step_ms", record["queued_ms"], record["peer_ms"], "vllm")
            yield compare(
                "step alone", case, "gpu_ms", record["gpu_ms"], record["plain_ms"], "graph of library kernels"
            )
    for record in records(document, "gaps"):
        yield Row("between replays", f"{record['rows']} rows", "share", round(record["share"], 4))
    for record in records(document, "prefill"):
        peer = record.get("peer_ms")
        case = f"{record['tokens']} tokens"
        yield (
            compare("prompt", case, "ms", record["ms"], peer, "vllm")
            if peer
            else Row("prompt", case, "ms", round(record["ms"], 4))
        )


def attention_rows(document: Record) -> Iterator[Row]:
    """Of every point our launch, our best launch where another was better by 5 %, FlashInfer's."""
    cases: dict[str, dict[str, float]] = {}
    for record in records(document, "attention"):
        if is_right(record):
            cases.setdefault(record["case"], {})[record["variant"]] = record["us"]
    for case, found in cases.items():
        ours = {name: us for name, us in found.items() if name.startswith("triton")}
        if "triton" in ours and "flashinfer tc" in found:
            yield compare("attention", case, "gpu_us", ours["triton"], found["flashinfer tc"], "flashinfer tc")
            best = min(ours, key=lambda name: ours[name])
            if ours[best] < 0.95 * ours["triton"]:
                yield compare("attention", case, "gpu_us", ours["triton"], ours[best], best)


def report_of(document: Record, *, commit: str, date: str, notes: list[str]) -> Report:
    return Report(
        what="decode",
        hardware="h200",
        machine={"gpus": [document["gpu"]]},
        commit=commit,
        command="python -m bench.micro.decode_step",
        versions={name: document[name] for name in ("python", "torch", "triton")},
        date=date,
        rows=[*step_rows(document), *attention_rows(document)],
        notes=notes,
        details={name: part for name, part in document.items() if isinstance(part, dict)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--date", required=True, help="of the run")
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    document = json.loads(args.file.read_text())
    print(write(report_of(document, commit=args.commit, date=args.date, notes=args.note), args.results))


if __name__ == "__main__":
    main()
