"""Compares our stack with peers and writes a dated result file.

    python -m bench.run embeddings --peer sentence-transformers --peer onnxruntime
    python -m bench.run embeddings --peer vllm --hardware h200 --tokenizer tokenizer.json

    python -m bench.run generation --peer transformers
    python -m bench.run generation --peer vllm --hardware h200 --device cuda --tokenizer tokenizer.json

The first is for a CPU and the default model. The second, on one GPU, is the four tables over HTTP with random weights
in Qwen3's shape; `--peer vllm` means its variants with one and with four API servers and the one with its defaults.
The third and fourth stream tokens: the default chat model on a CPU, random weights in Qwen3-0.6B's shape on a GPU.
Prints a table, and the path of the JSON file as its last line.
"""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench import embeddings, generation, http_embeddings, report
from bench.load import LoadError
from bench.peers import GENERATING_PEERS, HTTP_PEERS, PEERS, GeneratingSetup, HttpSetup, Setup, make_http_peer
from bench.servers import ServerFailed, read, running
from bench.stack import StackFailed, default_model, end_in_order_when_told
from bench.tables import cases
from bench.token_inputs import TokenInputs, read_passages
from bench.workloads import load_tokenizer

MAX_LENGTH = 256  # tokens: the default model's own limit
READY_S = 400.0
SHARED_MEMORY, ALONE_MEMORY = 0.42, 0.85  # of the GPU, for each of two servers or for one
VARIANTS = {"vllm": ("vllm", "vllm-api4", "vllm-default")}


def run_embeddings(args: argparse.Namespace, into: report.Report) -> None:
    if args.tables or any(name in HTTP_PEERS for name in args.peer):
        run_tables(args, into)
        return
    name, directory = default_model()
    threads = args.threads or len(os.sched_getaffinity(0))
    sizes = embeddings.Sizes(num_repeats=args.repeats)
    if args.quick:
        sizes = embeddings.Sizes(num_passages=64, num_queries=20, num_single_passages=10, num_repeats=1)
    embeddings.run(into, Setup(name, directory, MAX_LENGTH, threads), args.peer, sizes)


def run_tables(args: argparse.Namespace, into: report.Report) -> None:
    """With servers that run already (--state) or with its own, which end with it."""
    from bench.random_model import SHAPES, write_models  # torch: only here

    with ExitStack() as stack:
        state = args.state or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bqb-")))
        if args.tokenizer is None and args.models is None:
            sys.exit("bench: the tables need --tokenizer, a tokenizer.json of Qwen's vocabulary")
        models = args.models or state / "models"
        if args.tokenizer is not None:
            write_models(models, args.tokenizer, SHAPES[args.size])
        peers = [make_http_peer(variant) for name in args.peer for variant in variants_of(name, args.no_variants)]
        ours = make_http_peer("ours")
        setup = HttpSetup(models, state, args.peer_site, args.device)
        specs = [spec for peer in (ours, *peers) for spec in peer.servers(setup)]
        up = [server for spec in specs if (server := read(state, spec.name)) is not None]
        if args.state is None:
            up = stack.enter_context(running(specs, state, READY_S))
        into.details["servers"] = {
            server.name: {"settings": server.settings, "ready_s": server.ready_s} for server in up
        }
        inputs = TokenInputs(load_tokenizer(models / "embed"), read_passages(args.passages))
        chosen = [case for case in cases() if args.table is None or case.table in args.table]
        if args.quick:
            chosen = http_embeddings.shortened(chosen)
        options = http_embeddings.Options(
            repeats=args.repeats,
            budget_s=args.budget_s,
            gpu_ms=http_embeddings.read_gpu_ms(args.gpu_times),
            tcp_run_dir=state / "run-ours",
            quick=args.quick,
        )
        http_embeddings.run(
            into,
            chosen,
            ours.endpoint(),
            [peer.endpoint() for peer in peers],
            inputs,
            options,
            lambda filled: report.write(filled, args.results),
        )


def variants_of(name: str, exactly: bool) -> tuple[str, ...]:
    return (name,) if exactly else VARIANTS.get(name, (name,))


def run_generation(args: argparse.Namespace, into: report.Report) -> None:
    on_gpu = args.device == "cuda"
    with ExitStack() as stack:
        state = args.state or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bqb-")))
        name, directory = _random_chat_model(args, state) if args.tokenizer or args.models else default_model(1)
        cases = generation.GPU_CASES if on_gpu else generation.CPU_CASES
        setup = GeneratingSetup(
            model=name,
            model_dir=directory,
            num_threads=args.threads or len(os.sched_getaffinity(0)),
            state=state,
            max_model_len=max(case.length + case.num_tokens for case in cases),
            memory_fraction=ALONE_MEMORY if args.alone else SHARED_MEMORY,
            device="cuda" if on_gpu else "cpu",
            peer_site=args.peer_site,
        )
        options = generation.Options(
            peers=args.peer,
            cases=generation.shortened(cases) if args.quick else cases,
            repeats=1 if args.quick else args.repeats,
            alone=args.alone,
            passages=args.passages,
        )
        generation.run(into, setup, options, lambda filled: report.write(filled, args.results))


def _random_chat_model(args: argparse.Namespace, state: Path) -> tuple[str, Path]:
    from bench.random_model import SHAPES, write_models  # torch: only here

    models = args.models or state / "models"
    if args.tokenizer is not None:
        write_models(models, args.tokenizer, SHAPES[args.size])
    return "generate", models / "generate"


SUITES = {"embeddings": run_embeddings, "generation": run_generation}


def main() -> None:
    args = build_parser().parse_args()
    end_in_order_when_told()
    into = report.new_report(args.suite + ("-quick" if args.quick else ""), args.hardware)
    into.commit = args.commit or into.commit
    try:
        SUITES[args.suite](args, into)
    except (StackFailed, ServerFailed, LoadError, embeddings.Disagreement, ImportError) as error:
        sys.exit(f"bench: {error}")
    path = report.write(into, args.results)
    shown = into.rows
    if any(row.table == "4" for row in shown):  # the file has them all
        shown = [row for row in shown if row.metric in ("p50_ms", "p99_ms", "embeddings_per_s")]
    print("\n".join(report.table_lines(shown)))
    print("\n".join(into.notes))
    print(path)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=SUITES)
    names = dict.fromkeys([*PEERS, *HTTP_PEERS, *GENERATING_PEERS])
    parser.add_argument("--peer", action="append", default=[], choices=[name for name in names if name != "ours"])
    parser.add_argument("--hardware", default="cpu", help="short name of the machine, part of the file's name")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each peer; default: all cores")
    parser.add_argument("--quick", action="store_true", help="a small run to see that everything works; no figures")
    parser.add_argument("--commit", help="what is measured, where there is no repository to ask")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where the files go")
    tables = parser.add_argument_group("the four tables")
    tables.add_argument("--tables", action="store_true", help="measure them even without a server among the peers")
    tables.add_argument("--table", action="append", choices=["1", "2", "3", "4"], help="default: all")
    tables.add_argument("--no-variants", action="store_true", help="exactly the peers named")
    tables.add_argument("--tokenizer", type=Path, help="Qwen's tokenizer.json; the random models are written with it")
    tables.add_argument("--models", type=Path, help="where they are or go; default: a temporary directory")
    tables.add_argument("--size", default="0.6b", help="of the random models: 0.6b or tiny")
    tables.add_argument("--passages", type=Path, help="JSON lines with `text`, .gz or plain; default: the demo's")
    tables.add_argument("--state", type=Path, help="servers that bench.servers started there are used and left running")
    tables.add_argument("--peer-site", type=Path, help="where the peer's packages are, if not installed")
    tables.add_argument("--gpu-times", type=Path, help="what bench.gpu_time wrote")
    tables.add_argument("--budget-s", type=float, default=3600.0, help="no case begins after so many seconds")
    tables.add_argument("--device", default="auto", help="of our ranks")
    streams = parser.add_argument_group("generation")
    streams.add_argument("--alone", action="store_true", help="one peer after the other, each with the whole GPU")
    return parser


if __name__ == "__main__":
    main()
