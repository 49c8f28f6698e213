"""The suite `generation`: time to the first token, between tokens, and tokens a second, against peers.

One run on one machine with the same prompts, as token ids, greedy, each of a fixed number of tokens. Before anything
is timed, continuations are compared. Peers take turns unless they have to have the machine alone; figures are over
the streams of all repeats.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct, structs

from bench.load import LoadResult, median, percentile
from bench.peers import GeneratingPeer, GeneratingSetup, make_generating_peer
from bench.report import Report, Row, compare
from bench.token_inputs import TokenInputs, read_passages
from bench.workloads import load_tokenizer

AGREEMENT_PROMPTS, AGREEMENT_LENGTH, AGREEMENT_TOKENS = 8, 64, 16
GOAL = ">= 1.0x"
OWN = {"ours": "", "ours-in-process": " in process"}  # what their cases are called besides
PAUSE_S = 0.3  # between peers: threads of the last one go to sleep


class Case(Struct, frozen=True):
    """Prompts of `length` tokens, `in_flight` at a time, `num_tokens` after each."""

    table: str
    length: int
    num_tokens: int
    in_flight: int
    num_requests: int

    @property
    def name(self) -> str:
        return f"{self.in_flight} x {self.length} + {self.num_tokens}"

    @property
    def is_prefill(self) -> bool:
        return self.num_tokens == 1


CPU_CASES = [
    Case("decode", 128, 64, 1, 6),
    Case("decode", 128, 64, 8, 16),
    Case("prefill", 512, 1, 1, 8),
]
GPU_CASES = [Case("decode", 512, 128, in_flight, max(4, 2 * in_flight)) for in_flight in (1, 8, 32, 128)] + [
    Case("prefill", length, 1, 1, 16) for length in (512, 8192)
]

Samples = dict[tuple[str, str], list[LoadResult]]  # (case, peer) → one a repeat


class Options(Struct, frozen=True):
    peers: list[str]
    cases: list[Case]
    repeats: int = 3
    alone: bool = False  # one peer after the other has the machine
    passages: Path | None = None


def run(report: Report, setup: GeneratingSetup, options: Options, save: Callable[[Report], object]) -> None:
    """Fills `report`, and saves it after every repeat."""
    inputs = TokenInputs(load_tokenizer(setup.model_dir), read_passages(options.passages))
    vocab_size = json.loads((setup.model_dir / "config.json").read_text())["vocab_size"]
    probes = inputs.take_ids(AGREEMENT_LENGTH, AGREEMENT_PROMPTS, below=vocab_size)
    peers = [make_generating_peer(name) for name in ("ours", *options.peers)]
    samples: Samples = {}
    texts: dict[str, list[str]] = {}
    for group in [[peer] for peer in peers] if options.alone else [peers]:
        with ExitStack() as launched:
            for peer in group:
                say(f"starting {peer.name}")
                launched.enter_context(peer.launch(setup))
                texts[peer.name] = [peer.complete(prompt, AGREEMENT_TOKENS) for prompt in probes]
            for repeat in range(options.repeats):
                turn = repeat % len(group)
                for case in options.cases:
                    measure(case, group[turn:] + group[:turn], inputs, samples, vocab_size)
                report.rows = rows(options.cases, peers, samples)
                save(report)
    report.notes += agreement(peers, texts)
    report.notes.append(f"greedy, token-id prompts cut from real passages, model {setup.model} on {setup.device}")
    report.details["repeats"] = {
        f"{case}: {name}": [summary(result) for result in results] for (case, name), results in samples.items()
    }


def measure(
    case: Case, peers: list[GeneratingPeer], inputs: TokenInputs, samples: Samples, vocab_size: int | None = None
) -> None:
    """All peers in turn, with the same fresh prompts."""
    prompts = inputs.take_ids(case.length, case.in_flight + case.num_requests, below=vocab_size)
    for peer in peers:
        time.sleep(PAUSE_S)
        result = peer.generate(prompts, case.num_tokens, case.in_flight, case.in_flight)
        samples.setdefault((case.name, peer.name), []).append(result)
        say(f"{case.table:8s} {case.name:20s} {peer.name:14s} {summary(result)}")


def agreement(peers: list[GeneratingPeer], texts: dict[str, list[str]]) -> list[str]:
    """One note for each peer: how many continuations are ours."""
    ours, *others = peers
    notes = []
    for peer in others:
        same = sum(a == b for a, b in zip(texts[ours.name], texts[peer.name], strict=True))
        text = f"{same} of {AGREEMENT_PROMPTS} greedy continuations of {AGREEMENT_TOKENS} tokens equal {peer.label}'s"
        notes.append(text if 2 * same >= AGREEMENT_PROMPTS else f"DISAGREEMENT, figures may not compare: {text}")
        say(notes[-1])
    return notes


def rows(cases: list[Case], peers: list[GeneratingPeer], samples: Samples) -> list[Row]:
    """Of ours over HTTP against every peer, and of our rank in process, where it was measured, likewise."""
    own = [peer for peer in peers if peer.name in OWN]
    others = [peer for peer in peers if peer.name not in OWN]
    found = []
    for case in cases:
        for peer in own:
            if not (mine := samples.get((case.name, peer.name))):
                continue
            name = case.name + OWN[peer.name]
            theirs = [(other, samples[case.name, other.name]) for other in others if (case.name, other.name) in samples]
            for metric, value in figures(case, mine).items():
                for other, results in theirs:
                    row = compare(case.table, name, metric, value, figures(case, results)[metric], other.label)
                    found.append(structs.replace(row, goal=GOAL if metric.endswith("tokens_per_s") else None))
                if not theirs:
                    found.append(Row(case.table, name, metric, round(value, 4)))
    return found


def figures(case: Case, results: list[LoadResult]) -> dict[str, float]:
    first = [value for result in results for value in result.first_ms]
    found = {"ttft_p50_ms": percentile(first, 50), "ttft_p99_ms": percentile(first, 99)}
    if case.is_prefill:
        return found | {"prefill_tokens_per_s": case.length * 1000 / percentile(first, 50)}
    gaps = [value for result in results for value in result.gaps_ms]
    rate = sum(sum(result.num_tokens) for result in results) / sum(result.seconds for result in results)
    return found | {"itl_p50_ms": percentile(gaps, 50), "itl_p99_ms": percentile(gaps, 99), "tokens_per_s": rate}


def summary(result: LoadResult) -> dict[str, float]:
    return {
        "streams": len(result.first_ms),
        "ttft_p50_ms": round(median(result.first_ms), 2),
        "itl_p50_ms": round(percentile(result.gaps_ms, 50), 3) if result.gaps_ms else 0.0,
        "tokens_per_s": round(sum(result.num_tokens) / result.seconds, 1),
    }


def shortened(cases: list[Case]) -> list[Case]:
    """A few short streams of every kind, to see that all works."""
    return [
        structs.replace(
            case,
            length=min(case.length, 48),
            num_tokens=min(case.num_tokens, 8),
            in_flight=min(case.in_flight, 4),
            num_requests=min(case.num_requests, 4),
        )
        for case in cases
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
