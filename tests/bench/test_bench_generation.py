"""The suite `generation`: turns, figures and agreement around still peers, and the peer that computes here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from bench import generation
from bench.generation import CPU_CASES, GPU_CASES, Case, Options, figures, shortened
from bench.load import LoadResult
from bench.peers import GENERATING_PEERS, GeneratingSetup
from bench.peers.ours_in_process import OursInProcess
from bench.peers.transformers import float32
from bench.peers.vllm_generating import VllmGenerating
from bench.report import new_report
from tests.rose.tiny_models import llama_config, save

TIMED = LoadResult(
    seconds=2.0, latencies_ms=[50.0, 70.0], first_ms=[10.0, 30.0], gaps_ms=[20.0, 20.0, 30.0, 10.0], num_tokens=[3, 3]
)


class StillPeer:
    """Takes no time; notes when it was asked."""

    def __init__(self, name: str, log: list[str], text: str = "same", slower: float = 1.0) -> None:
        self.name = self.label = name
        self._log, self._text, self._slower = log, text, slower

    @contextmanager
    def launch(self, setup: GeneratingSetup) -> Iterator[None]:
        self._log.append(f"{self.name} up")
        yield
        self._log.append(f"{self.name} down")

    def generate(self, prompts: list[list[int]], num_tokens: int, in_flight: int, num_warmup: int) -> LoadResult:
        self._log.append(self.name)
        count = len(prompts) - num_warmup
        times = [10.0 * self._slower] * count
        gaps = times * (num_tokens - 1)
        return LoadResult(
            seconds=self._slower, latencies_ms=times, first_ms=times, gaps_ms=gaps, num_tokens=[num_tokens] * count
        )

    def complete(self, prompt: list[int], num_tokens: int) -> str:
        return f"{self._text} {len(prompt)} {num_tokens}"


def word_tokenizer(directory: Path) -> None:
    """tokenizer.json of 128 words, which knows every text as [UNK]."""
    words = {"[UNK]": 0} | {f"w{i}": i for i in range(1, 128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))


def setup(directory: Path) -> GeneratingSetup:
    return GeneratingSetup(
        model="m", model_dir=directory, num_threads=1, state=directory, max_model_len=64, memory_fraction=0.4
    )


def run_with(peers: list[StillPeer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, alone: bool = False):  # type: ignore[no-untyped-def]
    word_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    by_name = {peer.name: peer for peer in peers}
    monkeypatch.setattr(generation, "make_generating_peer", by_name.__getitem__)
    monkeypatch.setattr(generation, "PAUSE_S", 0)
    report = new_report("generation", "cpu")
    cases = [Case("decode", 8, 4, 2, 4), Case("prefill", 8, 1, 1, 3)]
    options = Options(peers=[peer.name for peer in peers[1:]], cases=cases, repeats=2, alone=alone)
    saved: list[int] = []
    generation.run(report, setup(tmp_path), options, lambda filled: saved.append(len(filled.rows)))
    return report, saved


def test_peers_take_turns_and_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    peers = [StillPeer("ours", log), StillPeer("peer", log, slower=2.0)]
    report, saved = run_with(peers, tmp_path, monkeypatch)
    assert log == ["ours up", "peer up", *["ours", "peer"] * 2, *["peer", "ours"] * 2, "peer down", "ours down"]
    assert saved == [8, 8]
    rows = {(row.table, row.metric): row for row in report.rows}
    rate = rows["decode", "tokens_per_s"]
    assert (rate.ours, rate.peer, rate.ratio, rate.goal) == (16.0, 8.0, 2.0, ">= 1.0x")
    assert (rows["decode", "itl_p50_ms"].ours, rows["decode", "itl_p50_ms"].ratio) == (10.0, 2.0)
    assert rows["prefill", "prefill_tokens_per_s"].ours == 800.0
    assert "8 of 8 greedy continuations of 16 tokens equal peer's" in report.notes[0]
    assert set(report.details["repeats"]) == {f"{c}: {p}" for c in ("2 x 8 + 4", "1 x 8 + 1") for p in ("ours", "peer")}


def test_alone_means_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    peers = [StillPeer("ours", log), StillPeer("peer", log, text="other")]
    report, _ = run_with(peers, tmp_path, monkeypatch, alone=True)
    assert log == ["ours up", *["ours"] * 4, "ours down", "peer up", *["peer"] * 4, "peer down"]
    assert report.notes[0].startswith("DISAGREEMENT, figures may not compare: 0 of 8")
    assert {row.peer_name for row in report.rows} == {"peer"}


def test_figures() -> None:
    found = figures(Case("decode", 8, 3, 1, 2), [TIMED, TIMED])
    assert found == {
        "ttft_p50_ms": 10.0,
        "ttft_p99_ms": 30.0,
        "itl_p50_ms": 20.0,
        "itl_p99_ms": 30.0,
        "tokens_per_s": 3.0,
    }


def test_the_cases_cover_what_is_promised() -> None:
    assert {(case.length, case.in_flight) for case in GPU_CASES if not case.is_prefill} == {
        (512, count) for count in (1, 8, 32, 128)
    }
    assert {case.length for case in GPU_CASES if case.is_prefill} == {512, 8192}
    assert {case.in_flight for case in CPU_CASES if not case.is_prefill} == {1, 8}
    assert all(case.length <= 48 and case.in_flight <= 4 for case in shortened(GPU_CASES))


def test_our_rank_in_process_generates_as_transformers_does(tmp_path: Path) -> None:
    theirs = save(transformers.LlamaForCausalLM, llama_config(), tmp_path)
    word_tokenizer(tmp_path)
    prompts = [[3, 4, 5], [9, 8, 7], [1, 2, 6], [2, 2, 2]]
    peer = OursInProcess()
    with peer.launch(setup(tmp_path)):
        result = peer.generate(prompts, num_tokens=4, in_flight=2, num_warmup=2)
        text = peer.complete(prompts[0], 5)
    assert (len(result.first_ms), len(result.gaps_ms), result.num_tokens) == (2, 6, [4, 4])
    assert min(result.first_ms) > 0
    assert max(result.first_ms) < min(result.latencies_ms) <= result.seconds * 1000
    expected = theirs.generate(
        input_ids=theirs.dummy_inputs["input_ids"].new_tensor(prompts[:1]), max_new_tokens=5, do_sample=False,
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    assert text.split() == ["[UNK]" if i == 0 else f"w{i}" for i in expected[0, 3:].tolist()]


def test_our_rank_in_process_has_rows_of_its_own() -> None:
    log: list[str] = []
    peers = [StillPeer("ours", log), StillPeer("ours-in-process", log), StillPeer("theirs", log)]
    case = Case("decode", 8, 3, 1, 2)
    samples = {(case.name, peer.name): [TIMED] for peer in peers}
    found = generation.rows([case], peers, samples)  # type: ignore[arg-type]
    assert {(row.case, row.peer_name) for row in found} == {
        (case.name, "theirs"),
        (f"{case.name} in process", "theirs"),
    }


def test_every_peer_has_its_file() -> None:
    for target in GENERATING_PEERS.values():
        module = target.partition(":")[0]
        assert (Path(generation.__file__).parent / "peers" / f"{module.rpartition('.')[2]}.py").is_file()


def test_transformers_generates_as_its_own_generate_does(tmp_path: Path) -> None:
    theirs = save(transformers.LlamaForCausalLM, llama_config(), tmp_path)
    word_tokenizer(tmp_path)
    peer = float32()
    with peer.launch(setup(tmp_path)):
        assert peer.label == f"transformers {transformers.__version__} (float32)"
        ids, times_ms = peer._batch([[3, 4, 5], [9, 8, 7]], 5)
        assert times_ms == sorted(times_ms)
        result = peer.generate([[1, 2, 3]] * 6, num_tokens=4, in_flight=2, num_warmup=2)
        text = peer.complete([3, 4, 5], 5)
    expected = theirs.generate(
        input_ids=theirs.dummy_inputs["input_ids"].new_tensor([[3, 4, 5], [9, 8, 7]]),
        attention_mask=theirs.dummy_inputs["input_ids"].new_ones(2, 3),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    assert ids.tolist() == expected[:, 3:].tolist()
    assert text.split() == ["[UNK]" if i == 0 else f"w{i}" for i in ids[0].tolist()]
    assert (len(result.first_ms), len(result.gaps_ms), result.num_tokens) == (4, 12, [4] * 4)


def test_how_vllm_is_started(tmp_path: Path) -> None:
    spec = VllmGenerating().server(setup(tmp_path))
    command = " ".join(spec.command)
    for option in (f"serve {tmp_path}", "--served-model-name m", "--max-model-len 64", "--gpu-memory-utilization 0.4"):
        assert option in command
    assert "--no-enable-prefix-caching" in spec.settings
