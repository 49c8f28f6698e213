"""The four tables: their cases, their inputs, who is measured, and what becomes of samples."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from tokenizers import Tokenizer

from bench import agreement, http_embeddings, random_model, run, small_models, tables
from bench.gpu_time import parts_of
from bench.http_embeddings import Options, Samples, best_variants, fill, takes_part
from bench.load import LoadError, LoadResult
from bench.peers import HTTP_PEERS, Endpoint, HttpSetup, make_http_peer
from bench.report import Report, new_report
from bench.tables import Case, cases, make_work
from bench.token_inputs import NotEnoughText, TokenInputs, read_passages
from bench.workloads import load_tokenizer
from rose.models.config import read_config
from rose.models.task import EmbedTask, ScoreTask, read_task

OURS = Endpoint("ours", "bouquet", "http://127.0.0.1:1", "http://127.0.0.1:1", "/v1/score", "pairs")
ONE = Endpoint("vllm", "vllm-0", "http://127.0.0.1:2", "http://127.0.0.1:3", "/classify", "input")
FOUR = structs.replace(ONE, name="vllm-api4", score_url="")
BESIDE = structs.replace(FOUR, name="vllm-default")


@pytest.fixture(scope="module")
def inputs(minilm_dir: Path) -> TokenInputs:
    return TokenInputs(load_tokenizer(minilm_dir), read_passages(None)[:300])


def result(*latencies_ms: float, seconds: float = 1.0) -> LoadResult:
    return LoadResult(seconds=seconds, latencies_ms=list(latencies_ms))


def test_ids_and_texts_have_their_length_and_none_comes_twice(inputs: TokenInputs, minilm_dir: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(minilm_dir)
    windows = inputs.take_ids(64, 50) + inputs.take_ids(64, 50)
    assert {len(window) for window in windows} == {64}
    assert len({tuple(window[:8]) for window in windows}) > 95  # no two begin at the same place
    texts = inputs.take_texts(32, 40)
    assert [len(tokenizer.encode(text).ids) for text in texts] == [32] * 40
    assert len(set(texts)) == 40


def test_no_input_is_given_out_again(minilm_dir: Path) -> None:
    few = TokenInputs(load_tokenizer(minilm_dir), read_passages(None)[:1])
    with pytest.raises(NotEnoughText, match="16 tokens"):
        few.take_ids(16, len(few.ids) + 1)


def test_every_line_of_the_tables_is_there() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    lengths = {(case.table, case.length) for case in cases() if case.model == "embed"}
    assert {("1", 128), ("1", 512), ("1", 4096), ("3", 512), ("3", 1024), ("3", 4096)} <= lengths
    assert {case.in_flight for case in cases() if case.table == "4" and case.form == "text"} == {1, 2, 4, 8, 16}
    assert [case.num_processes for case in cases() if case.table == "3"] == [4] * 6
    assert {case.batch for case in cases() if case.model == "score"} == {5, 25, 50}


def test_work_is_batches_for_every_process(inputs: TokenInputs) -> None:
    case = Case("3", "x", "embed", 3, 16, 2, num_processes=2)
    work = make_work(case, inputs, 1)
    assert [len(batches) for batches in work.requests] == [2, 2]
    assert [len(batch) for batches in [*work.requests, work.warmup] for batch in batches] == [3] * 5


def test_each_server_is_asked_in_its_own_way() -> None:
    case = Case("2", "x", "score", 1, 2, 1)
    for endpoint, path, field in ((OURS, "/v1/score", "pairs"), (ONE, "/classify", "input")):
        url, found, body = tables.target(endpoint, case)
        assert (url, found) == (endpoint.score_url, path)
        assert json.loads(body([[1, 2]])) == {"model": "score", field: [[1, 2]]}
    assert json.loads(tables.target(ONE, Case("1", "x", "embed", 1, 2, 1))[2]([[1, 2]])) == {
        "model": "embed",
        "input": [[1, 2]],
        "encoding_format": "base64",
    }


def test_all_variants_first_then_the_best_alone() -> None:
    score, ids = Case("2", "s", "score", 5, 8, 1), Case("4", "i", "embed", 1, 8, 1)
    text, pplx = structs.replace(ids, name="t", form="text"), Case("1", "p", "pplx", 1, 8, 1)

    def taking(case: Case, best: dict[str, str]) -> list[str]:
        return [peer.name for peer in (ONE, FOUR, BESIDE) if takes_part(case, peer, best)]

    assert taking(score, {}) == ["vllm"]
    assert taking(ids, {}) == ["vllm", "vllm-api4", "vllm-default"]
    assert taking(text, {}) == ["vllm", "vllm-api4"]
    assert taking(pplx, {}) == []
    assert taking(ids, {"4 embed": "vllm-api4", "2 score": "vllm"}) == ["vllm-api4"]
    assert taking(score, {"4 embed": "vllm-api4", "2 score": "vllm"}) == ["vllm"]


def test_rows_stand_against_the_best_variant() -> None:
    rate = Case("3", "100 x 8", "embed", 100, 8, 1, num_processes=4, goal=1.5)
    ids = Case("4", "1 x 8 ids, 2 in flight", "embed", 1, 8, 1, in_flight=2, goal=3.0)
    samples: Samples = {
        ("100 x 8", "ours"): [result(1, 1, seconds=2.0)],
        ("100 x 8", "vllm"): [result(1, 1, seconds=4.0)],
        ("100 x 8", "vllm-api4"): [result(1, 1, seconds=5.0)],
        (ids.name, "ours"): [result(2, 2, 3), result(2, 2, 2)],
        (ids.name, "vllm"): [result(9, 9, 9)],
        (ids.name, "vllm-api4"): [result(8, 8, 8)],
        (ids.name, "vllm-default"): [result(6, 6, 6)],
        ("1 x 8 tcp, 2 in flight", "ours"): [result(4, 4, 4)],
    }
    report = new_report("x", "cpu")
    best = best_variants([rate, ids], [ONE, FOUR, BESIDE], samples)
    assert best == {"3 embed": "vllm", "4 embed": "vllm-api4"}
    report.details["best_variant"] = best
    fill(report, [rate, ids], OURS, [ONE, FOUR, BESIDE], samples, {"embed 1x8": 1.25})
    rows = {(row.case, row.metric, row.peer_name): row for row in report.rows}
    throughput = rows["100 x 8", "embeddings_per_s", "vllm-0"]
    assert (throughput.ours, throughput.peer, throughput.ratio, throughput.goal) == (100, 50, 2.0, ">= 1.5x")
    latency = rows[ids.name, "p50_ms", "vllm-0"]
    assert (latency.ours, latency.peer, latency.ratio, latency.gpu_ms) == (2, 8, 4.0, 1.25)
    assert rows[ids.name, "max_ms", "vllm-0"].ours == 3
    assert rows[ids.name, "p50_ms", "vllm-0 (prefix caching on)"].ratio == 3.0
    assert (ids.name, "p99_ms", "vllm-0 (prefix caching on)") not in rows
    assert rows["1 x 8 tcp, 2 in flight", "p50_ms", "vllm-0"].ratio == 2.0


def test_a_server_that_fails_does_not_end_the_run(inputs: TokenInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Report] = []

    def measure(endpoint: Endpoint, case: Case, _: object) -> LoadResult:
        if endpoint.name == "vllm":
            raise LoadError("500")
        return result(5.0)

    monkeypatch.setattr(http_embeddings, "measure", measure)
    monkeypatch.setattr(
        agreement, "compare", lambda ours, peer, _: agreement.Agreement(peer.name, 0.5, 0.1, None, None)
    )
    report = new_report("x", "cpu")
    case = Case("1", "1 x 8", "embed", 1, 8, 1)
    http_embeddings.run(report, [case], OURS, [ONE, FOUR], inputs, Options(repeats=2, quick=True), saved.append)
    assert len(saved) == 2
    assert [note for note in report.notes if note.startswith("DISAGREEMENT")]
    assert len([note for note in report.notes if note.startswith("FAILED: '1 x 8'")]) == 1  # then it is not asked again
    assert {row.peer_name for row in report.rows} == {"vllm-0"}


def test_time_that_runs_out_keeps_what_there_is(inputs: TokenInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_embeddings, "measure", lambda *_: result(5.0))
    report = new_report("x", "cpu")
    http_embeddings.run(report, cases(), OURS, [], inputs, Options(budget_s=0.0, quick=True), lambda _: None)
    assert report.rows == []
    assert "time ran out in repeat 1" in report.notes[-1]


def test_random_models_are_what_they_should_be(tmp_path: Path, minilm_dir: Path) -> None:
    shape = structs.replace(random_model.SHAPES["tiny"], vocabulary=30_522)
    found = random_model.write_models(tmp_path, minilm_dir / "tokenizer.json", shape)
    embed, score, pplx = (read_task(found[kind], read_config(found[kind]), task) for kind, task in TASKS)  # type: ignore[arg-type]
    assert isinstance(embed, EmbedTask)
    assert isinstance(pplx, EmbedTask)
    assert isinstance(score, ScoreTask)
    assert (embed.pooling, embed.normalize) == ("last_token", True)
    assert (pplx.pooling, pplx.normalize, pplx.int8) == ("mean", False, "tanh")
    assert score.kind == "yes_no"
    assert (read_config(found["embed"]).causal, read_config(found["pplx"]).causal) == (True, False)
    stamp = (found["embed"] / "model.safetensors").stat().st_mtime_ns
    random_model.write_models(tmp_path, minilm_dir / "tokenizer.json", shape)
    assert (found["embed"] / "model.safetensors").stat().st_mtime_ns == stamp


TASKS = (("embed", "auto"), ("score", "score"), ("pplx", "auto"))


def test_every_http_peer_says_how_to_start_it(tmp_path: Path) -> None:
    ports = []
    for name in HTTP_PEERS:
        peer = make_http_peer(name)
        specs = peer.servers(HttpSetup(tmp_path / "m", tmp_path, tmp_path / "site"))
        assert {spec.name.removesuffix("-embed").removesuffix("-score") for spec in specs} == {name}
        urls = {peer.endpoint().embed_url, peer.endpoint().score_url or peer.endpoint().embed_url}
        assert urls == {f"http://127.0.0.1:{spec.port}" for spec in specs}
        ports += [spec.port for spec in specs]
        for spec in specs:
            assert ("vllm" in spec.command[2]) == (name != "ours")
            assert (spec.environment.get("PYTHONPATH") == str(tmp_path / "site")) == (name != "ours")
    assert len(ports) == len(set(ports))
    assert run.variants_of("vllm", False) == ("vllm", "vllm-api4", "vllm-default")


def test_a_batch_is_cut_as_gateway_and_planner_cut_it() -> None:
    assert parts_of(50, 512, 16_384) == [[512] * 32, [512] * 18]
    assert parts_of(1, 4096, 16_384) == [[4096]]
    assert parts_of(10, 4096, 8192) == [[4096] * 2] * 5


def test_retrieval_hides_the_sentence_it_asks_for() -> None:
    long = "One two three. Four five six. Seven eight nine ten eleven twelve thirteen. The very end. Really."
    queries, documents = small_models.retrieval_set([long, "Too short."], 5)
    assert queries == ["Seven eight nine ten eleven twelve thirteen."]
    assert queries[0] not in documents[0]
    vectors = np.eye(12, dtype=np.float32)
    assert small_models.ranking(vectors, vectors)[:, 0].tolist() == list(range(12))
