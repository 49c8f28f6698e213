"""The small pure parts: split, balance, metrics, errors, replicas, texts of a body."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from gateway import errors
from gateway.balance import least_outstanding
from gateway.dialects.fields import read_texts
from gateway.dialects.rerank import parse_rerank, render_rerank
from gateway.errors import GatewayError, InvalidRequest, NotReady, Overloaded, error_headers, render_error
from gateway.metrics import Metrics, render
from gateway.replicas import Replica, ReplicaWatcher
from gateway.split import MIN_CHUNK_TOKENS, split
from gateway.tasks import Encoded, Rows, ScoreOutcome, TokenInfo, TopToken
from ipc.control import ProcessStats
from ipc.types import Timings


@given(st.lists(st.integers(1, 900), min_size=1, max_size=60), st.integers(1, 5000), st.integers(0, 9))
def test_split_loses_nothing_and_keeps_the_bound(lengths: list[int], bound: int, num_replicas: int) -> None:
    sequences = [[i] * length for i, length in enumerate(lengths)]
    starts = [length // 2 for length in lengths]
    chunks = split(Encoded(sequences, starts), bound, num_replicas)
    assert [chunk.first for chunk in chunks] == list(np.cumsum([0, *[len(c.lengths) for c in chunks]])[:-1])
    assert [length for chunk in chunks for length in chunk.lengths] == lengths
    assert [start for chunk in chunks for start in chunk.type_starts] == starts
    ids = np.frombuffer(b"".join(chunk.frame for chunk in chunks), np.int32)
    assert ids.tolist() == [token for sequence in sequences for token in sequence]
    for chunk in chunks:
        assert chunk.num_tokens == sum(chunk.lengths)
        assert chunk.num_tokens <= bound or len(chunk.lengths) == 1


def test_split_shares_a_large_request_among_replicas() -> None:
    sequences = [[1] * 128] * 128
    assert len(split(Encoded(sequences), 16_384, 1)) == 1
    assert len(split(Encoded(sequences), 16_384, 4)) == 4
    assert all(c.num_tokens <= MIN_CHUNK_TOKENS for c in split(Encoded(sequences), 16_384, 100))


class Candidate(Struct):
    outstanding_tokens: int
    reported_tokens: int = 0


def test_balance() -> None:
    assert least_outstanding([], 0) is None
    light, heavy = Candidate(5), Candidate(6)
    assert least_outstanding([heavy, light], 3) is light
    twins = [Candidate(5, 2), Candidate(5, 1), Candidate(5, 1)]
    assert [least_outstanding(twins, turn) for turn in range(3)] == [twins[1], twins[2], twins[1]]


def test_rows_are_joined_over_blocks() -> None:
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    rows = Rows([values[:4].tobytes(), values[4:].tobytes()], 8, Timings(0, 0))
    np.testing.assert_array_equal(rows.matrix("<f4"), values)
    assert [bytes(row) for row in rows] == [row.tobytes() for row in values]


def test_every_kind_of_error_has_its_line_in_the_table() -> None:
    kinds = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, GatewayError) and c is not GatewayError
    ]
    assert set(kinds) == set(errors.KINDS)
    for kind in kinds:
        body = json.loads(render_error(kind("why", param="input")))["error"]
        assert (body["message"], body["param"]) == ("why", "input")


def test_retry_after_is_whole_seconds_and_only_where_it_helps() -> None:
    assert error_headers(Overloaded("full", retry_after_ms=1001)) == {"Retry-After": "2"}
    assert error_headers(NotReady("later")) == {"Retry-After": "1"}
    assert error_headers(InvalidRequest("bad")) == {}


def test_histogram_and_union() -> None:
    metrics = Metrics()
    for seconds in (0.0005, 0.001, 0.3, 100.0):
        metrics.request_seconds.observe(seconds)
    values = metrics.values()
    assert values['bouquet_http_request_seconds_bucket{le="0.001"}'] == 2
    assert values['bouquet_http_request_seconds_bucket{le="0.5"}'] == 3
    assert values['bouquet_http_request_seconds_bucket{le="+Inf"}'] == 4
    old = ProcessStats("gateway/0", 1, {"bouquet_failovers_total": 1.0})
    new = ProcessStats("gateway/0", 1, {"bouquet_failovers_total": 2.0})
    text = render([old, new]).decode()
    assert 'bouquet_failovers_total{process="gateway/0"} 2.0' in text
    assert text.count("bouquet_failovers_total{") == 1


def test_a_restarted_process_replaces_its_former_life() -> None:
    old = ProcessStats("gateway/0", 1, {"bouquet_failovers_total": 9.0})
    new = ProcessStats("gateway/0", 2, {"bouquet_failovers_total": 0.0})
    text = render([old, new]).decode()
    assert text.count("bouquet_failovers_total{") == 1


def test_watcher_tells_changes_only(tmp_path: Path) -> None:
    path = tmp_path / "replicas.json"
    told: list[object] = []
    watcher = ReplicaWatcher(path, told.append, lambda event, **_: told.append(event))
    watcher.poll()
    assert told == []
    path.write_text(
        '{"version": 1, "models": {"m": {"replicas": [{"id": "m/0", "endpoint": "ipc://x", "state": "draining"}]}}}'
    )
    watcher.poll()
    watcher.poll()
    assert told == ["replicas_changed", {"m": [Replica("m/0", "ipc://x", "draining")]}]
    path.write_text('{"version": "one"}')
    watcher.poll()
    watcher.poll()
    assert told[2:] == ["replicas_file_unreadable"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), (" ", [" "])],
)
def test_texts_in_all_their_forms(value: object, expected: object) -> None:
    assert read_texts("input", value) == expected  # type: ignore[arg-type]


def test_ties_keep_the_order_given() -> None:
    task = parse_rerank(b'{"model": "m", "query": "q", "documents": ["a", "b", "c", "d"], "top_n": 3}')
    body = json.loads(render_rerank(task, ScoreOutcome([0.5, 0.7, 0.5, 0.7], 9, "cross_encoder")))
    assert [result["index"] for result in body["results"]] == [1, 3, 0]


def test_tokens_with_logprobs_are_no_work_for_the_garbage_collector() -> None:
    top = TopToken("a", b"a", -1.0)
    assert not gc.is_tracked(top)
    assert not gc.is_tracked(TokenInfo("a", b"a", -1.0, [top], 0))
