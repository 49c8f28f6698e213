"""Compares our stack with peers and writes a dated result file.

    python -m bench.run embeddings --peer sentence-transformers --peer onnxruntime

Prints a table, and the path of the JSON file as its last line.
"""

import argparse
import os
import sys
from pathlib import Path

from bench import embeddings, report
from bench.peers import PEERS, Setup
from bench.stack import StackFailed, default_model, end_in_order_when_told

MAX_LENGTH = 256  # tokens: the default model's own limit


def run_embeddings(args: argparse.Namespace, into: report.Report) -> None:
    name, directory = default_model()
    threads = args.threads or len(os.sched_getaffinity(0))
    sizes = embeddings.Sizes(num_repeats=args.repeats)
    if args.quick:
        sizes = embeddings.Sizes(num_passages=64, num_queries=20, num_single_passages=10, num_repeats=1)
    embeddings.run(into, Setup(name, directory, MAX_LENGTH, threads), args.peer, sizes)


SUITES = {"embeddings": run_embeddings}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--peer", action="append", default=[], choices=[name for name in PEERS if name != "ours"])
    parser.add_argument("--hardware", default="cpu", help="short name of the machine, part of the file's name")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each peer; default: all cores")
    parser.add_argument("--quick", action="store_true", help="a small run to see that everything works; no figures")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where the files go")
    args = parser.parse_args()
    end_in_order_when_told()
    into = report.new_report(args.suite + ("-quick" if args.quick else ""), args.hardware)
    try:
        SUITES[args.suite](args, into)
    except (StackFailed, embeddings.Disagreement, ImportError) as error:
        sys.exit(f"bench: {error}")
    path = report.write(into, args.results)
    print("\n".join(report.table_lines(into.rows)))
    print("\n".join(into.notes))
    print(path)


if __name__ == "__main__":
    main()
