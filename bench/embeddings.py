"""The suite `embeddings`: one short query, one passage, and many passages, ours over HTTP against peers.

One run on one machine with the same texts. Peers take turns, figures are medians over repeats, and before anything
is timed all of them must give the same vectors.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bench.load import median, percentile
from bench.peers import Peer, Setup, make_peer
from bench.report import Report, Row, compare
from bench.workloads import load_tokenizer, natural_texts, texts_of

MIN_COSINE = 0.9999
QUERY_TOKENS, PASSAGE_TOKENS = 16, 128
PAUSE_S = 0.3  # between peers: threads of the last one go to sleep


class Sizes(Struct):
    """How much is measured in one repeat."""

    num_passages: int = 512
    num_queries: int = 60
    num_single_passages: int = 40
    num_repeats: int = 3


class Workload(Struct):
    queries: list[str]
    passages: list[str]
    natural: list[str]


class Disagreement(RuntimeError):
    """Peers give different vectors, so their speeds do not compare."""


def run(report: Report, setup: Setup, peer_names: list[str], sizes: Sizes) -> None:
    """Fills `report`. Raises Disagreement before timing anything."""
    tokenizer = load_tokenizer(setup.model_dir)
    work = Workload(
        queries=texts_of(tokenizer, QUERY_TOKENS, 20),
        passages=texts_of(tokenizer, PASSAGE_TOKENS, sizes.num_passages),
        natural=natural_texts(tokenizer, setup.max_length, sizes.num_passages),
    )
    with ExitStack() as launched:
        peers: list[Peer] = []
        for name in ["ours", *peer_names]:
            say(f"starting {name}")
            peer = make_peer(name)
            launched.enter_context(peer.launch(setup))
            peers.append(peer)
        agreement = check_agreement(peers, [*work.queries, *work.passages[:32], *work.natural[:32]])
        report.notes += [f"smallest cosine to {label}, before timing: {cosine:.7f}" for label, cosine in agreement]
        batch_sizes = {peer.label: best_batch_size(peer, work.passages, report) for peer in peers}
        samples = measure(peers, work, batch_sizes, sizes)
    report.details["repeats"] = samples
    report.details["batch_sizes"] = batch_sizes
    report.rows += rows(peers, samples)
    report.notes.append(
        f"texts: real passages; {sizes.num_passages} of exactly {PASSAGE_TOKENS} tokens, and as many as they are "
        f"(at most {setup.max_length} tokens); {setup.num_threads} threads each; "
        f"batch sizes chosen by trial: {batch_sizes}"
    )


def check_agreement(peers: list[Peer], texts: list[str]) -> list[tuple[str, float]]:
    """The smallest cosine between ours (the first) and each other peer. Raises Disagreement under MIN_COSINE."""
    ours, *others = [peer.encode(texts, 32) for peer in peers]
    found = [(peer.label, float((ours * other).sum(1).min())) for peer, other in zip(peers[1:], others, strict=True)]
    for label, cosine in found:
        if not cosine >= MIN_COSINE:
            raise Disagreement(f"vectors of {label} and ours agree only to cosine {cosine:.6f}; nothing was timed")
    return found


def best_batch_size(peer: Peer, passages: list[str], report: Report) -> int:
    """The batch size of the peer's own list that is fastest on some of the passages."""
    few = passages[: max(peer.batch_sizes) * 2]
    speeds = {size: len(few) / seconds(lambda size=size: peer.encode(few, size)) for size in peer.batch_sizes}  # type: ignore[misc]
    report.details.setdefault("batch_size_trials", {})[peer.label] = {
        str(size): round(speed, 1) for size, speed in speeds.items()
    }
    return max(speeds, key=lambda size: speeds[size])


def measure(
    peers: list[Peer], work: Workload, batch_sizes: dict[str, int], sizes: Sizes
) -> dict[str, dict[str, list[float]]]:
    """Label → figure → one value a repeat. The peers' order rotates."""
    samples: dict[str, dict[str, list[float]]] = {peer.label: {} for peer in peers}
    for repeat in range(sizes.num_repeats):
        for peer in peers[repeat % len(peers) :] + peers[: repeat % len(peers)]:
            say(f"repeat {repeat + 1} of {sizes.num_repeats}: {peer.label}")
            time.sleep(PAUSE_S)
            found = measure_once(peer, work, batch_sizes[peer.label], sizes)
            for figure, value in found.items():
                samples[peer.label].setdefault(figure, []).append(round(value, 4))
    return samples


def measure_once(peer: Peer, work: Workload, batch_size: int, sizes: Sizes) -> dict[str, float]:
    query_ms = latencies_ms(peer, work.queries, sizes.num_queries)
    passage_ms = latencies_ms(peer, work.passages, sizes.num_single_passages)
    return {
        "query p50_ms": percentile(query_ms, 50),
        "query p99_ms": percentile(query_ms, 99),
        "passage p50_ms": percentile(passage_ms, 50),
        "passages passages_per_s": len(work.passages) / seconds(lambda: peer.encode(work.passages, batch_size)),
        "natural passages_per_s": len(work.natural) / seconds(lambda: peer.encode(work.natural, batch_size)),
    }


def latencies_ms(peer: Peer, texts: list[str], count: int) -> list[float]:
    """One text at a time, after a few that do not count."""
    for text in texts[:5]:
        peer.encode([text], 1)
    return [seconds(lambda i=i: peer.encode([texts[i % len(texts)]], 1)) * 1000 for i in range(count)]  # type: ignore[misc]


def seconds(work: Callable[[], NDArray[np.float32]]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


CASES = {
    "query": f"1 × {QUERY_TOKENS} tokens",
    "passage": f"1 × {PASSAGE_TOKENS} tokens",
    "passages": f"many × {PASSAGE_TOKENS} tokens",
    "natural": "many, as they are",
}


def rows(peers: list[Peer], samples: dict[str, dict[str, list[float]]]) -> list[Row]:
    ours, *others = peers
    found = []
    for figure, values in samples[ours.label].items():
        case, _, metric = figure.partition(" ")
        for peer in others:
            theirs = median(samples[peer.label][figure])
            row = compare("cpu", CASES[case], metric, median(values), theirs, peer.label)
            row.goal = goal(figure, peer.label)
            found.append(row)
        if not others:
            found.append(Row("cpu", CASES[case], metric, median(values)))
    return found


def goal(figure: str, label: str) -> str | None:
    """What the project set out to reach."""
    if figure == "query p50_ms":
        return "<= 5 ms" if label.startswith("sentence") else "<= peer + 1 ms (stretch)"
    if figure == "passages passages_per_s" and label.startswith("sentence"):
        return ">= 1.05x (stretch 1.15x)"
    return None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
