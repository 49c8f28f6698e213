"""The suites around their peers: agreement first, turns, medians; start-up phases and parts of the overhead."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import embeddings
from bench.embeddings import Disagreement, Sizes, Workload, best_batch_size, check_agreement, measure, rows
from bench.load import LoadResult
from bench.micro import overhead, startup
from bench.peers import PEERS
from bench.report import new_report
from bench.stack import RunningStack


class StillPeer:
    """Gives vectors by length, and notes what it was asked for."""

    def __init__(self, label: str, wrong: float = 0.0) -> None:
        self.label = label
        self.batch_sizes = (2, 4)
        self.calls: list[tuple[int, int]] = []
        self._wrong = wrong

    def encode(self, texts: list[str], batch_size: int) -> np.ndarray:
        self.calls.append((len(texts), batch_size))
        angles = np.array([len(text) for text in texts]) + self._wrong
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def test_nothing_is_timed_when_vectors_differ() -> None:
    good, bad = StillPeer("good"), StillPeer("bad", wrong=0.1)
    texts = ["a", "bb", "ccc"]
    assert check_agreement([StillPeer("ours"), good], texts)[0] == ("good", pytest.approx(1.0, abs=1e-6))
    with pytest.raises(Disagreement, match=r"bad and ours agree only to cosine 0\.995"):
        check_agreement([StillPeer("ours"), good, bad], texts)
    with pytest.raises(Disagreement):
        check_agreement([StillPeer("ours"), StillPeer("nan", wrong=float("nan"))], texts)


def test_peers_take_turns_and_figures_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "PAUSE_S", 0)
    turns: list[str] = []
    values = iter([1.0, 10.0, 30.0, 3.0, 2.0, 20.0])  # ours, peer; peer, ours; ours, peer

    def once(peer: StillPeer, *_: object) -> dict[str, float]:
        turns.append(peer.label)
        value = next(values)
        return {"query p50_ms": value, "passages passages_per_s": value}

    monkeypatch.setattr(embeddings, "measure_once", once)
    peers = [StillPeer("ours"), StillPeer("sentence-transformers 1")]
    work = Workload(queries=[], passages=[], natural=[])
    samples = measure(peers, work, {peer.label: 2 for peer in peers}, Sizes(num_repeats=3))
    assert turns == ["ours", "sentence-transformers 1", "sentence-transformers 1", "ours", "ours", turns[1]]
    latency, rate = rows(peers, samples)
    assert (latency.ours, latency.peer, latency.ratio, latency.goal) == (2.0, 20.0, 10.0, "<= 5 ms")
    assert (rate.ours, rate.peer, rate.ratio) == (2.0, 20.0, 0.1)
    assert rate.goal == ">= 1.05x (stretch 1.15x)"


def test_one_repeat_measures_every_figure() -> None:
    peer = StillPeer("ours")
    work = Workload(queries=["q"] * 5, passages=["p"] * 8, natural=["n"] * 8)
    found = embeddings.measure_once(peer, work, 4, Sizes(num_queries=6, num_single_passages=3))
    assert {name.partition(" ")[0] for name in found} == set(embeddings.CASES)
    assert all(value > 0 for value in found.values())
    assert peer.calls.count((8, 4)) == 2


def test_batch_size_is_one_of_the_peers_own_and_trials_are_kept() -> None:
    report = new_report("x", "cpu")
    peer = StillPeer("ours")
    assert best_batch_size(peer, ["p"] * 20, report) in peer.batch_sizes
    assert set(report.details["batch_size_trials"]["ours"]) == {"2", "4"}
    assert [size for _, size in peer.calls] == [2, 4]


def test_every_peer_has_its_file() -> None:
    for target in PEERS.values():
        module = target.partition(":")[0]
        assert (Path(embeddings.__file__).parent / "peers" / f"{module.rpartition('.')[2]}.py").is_file()


def test_phases_of_a_start_sum_up(tmp_path: Path) -> None:
    def line(process: str, event: str, second: float, up_ms: int = 0) -> str:
        stamp = f"2026-01-02T03:04:{second:06.3f}Z"
        return json.dumps({"ts": stamp, "process": process, "event": event, "up_ms": up_ms})

    (tmp_path / "logs").mkdir()
    texts = {
        "m-0-rank-0": [("started", 1.5, 400), ("imported", 3, 0), ("waiting_for_scheduler", 3.25, 0), ("ready", 4, 0)],
        "m-0-scheduler": [("started", 1.2, 100), ("scheduler_started", 1.25, 0), ("epoch_begins", 3.5, 0)]
        + [("ranks_ready", 4.25, 0), ("ranks_ready", 9, 0)],
        "gateway-0": [("imported", 2, 0), ("listening", 2.5, 0)],
    }
    for name, events in texts.items():
        lines = [line(name, event, second, up_ms) for event, second, up_ms in events]
        (tmp_path / "logs" / f"{name}.log").write_text("\n".join(["not ours", *lines]))
    start = startup.read_events(list((tmp_path / "logs").glob("*.log")))[("m-0-rank-0", "begun")] - 1.1
    found = startup.phases(RunningStack("", tmp_path, "m", started=start, ready=start + 5))
    assert found["bouquet up: configuration, files, supervisord"] == pytest.approx(1100, abs=1)
    assert found["rank: imports (torch)"] == pytest.approx(1500, abs=1)
    assert found["rank: weights, memory, first forward"] == pytest.approx(750, abs=1)
    chain = sum(value for name, value in found.items() if name != "total" and not name.startswith("(beside)"))
    assert chain == pytest.approx(found["total"], abs=1)
    with pytest.raises(KeyError, match="no 'joined'"):
        startup.find({}, "gateway-0", "joined")


def test_parts_of_the_overhead_sum_up() -> None:
    headers = {"x-tokenize-ms": 0.05, "x-queue-ms": 0.06, "x-compute-ms": 0.1}
    alone = LoadResult(seconds=1.0, latencies_ms=[0.6, 0.8], headers_ms=headers)
    crowd = LoadResult(seconds=1.0, latencies_ms=[5.0] * 10)
    found = [overhead.Measured(alone, crowd, gateway_ms=0.5, cpu_ms={"gateway": 0.2})]
    body = json.dumps({"model": "m", "input": [1, 2, 3], "encoding_format": "base64"})
    *parts, (_, total) = overhead.parts(found, body)
    assert total == pytest.approx(0.7)
    assert sum(value for _, value in parts) == pytest.approx(total)
    assert all(value > 0 for _, value in parts)
