"""Percentiles, and both load loops in real processes against a local server."""

import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.client import Response
from bench.closed_loop import header_means
from bench.load import LoadError, LoadSpec, check_spec, percentile, run_load, run_one


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bodies: list[bytes] = []  # noqa: RUF012 - the server makes the instances

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        status = 200 if self.path == "/good" else 400
        answer = b"{}" if status == 200 else b'{"error": {"message": "no"}}'
        self.send_response(status)
        self.send_header("X-Queue-Ms", "0.50")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_percentile_is_a_sample_at_the_nearest_rank() -> None:
    samples = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(samples, p) for p in (0, 20, 21, 50, 80, 99, 100)] == [1, 1, 2, 3, 4, 5, 5]
    assert percentile(range(1, 1001), 99) == 990
    assert percentile([7.0], 50) == 7.0
    assert math.isnan(percentile([], 50))


def test_closed_loop_sends_each_body_in_turn_and_keeps_every_sample(url: str) -> None:
    Handler.bodies.clear()
    spec = LoadSpec(url=url, path="/good", bodies=['{"a":1}', '{"a":2}'], concurrency=4, num_requests=100, num_warmup=0)
    result = run_one(spec)
    assert len(result.latencies_ms) == 100
    assert sorted(Handler.bodies) == [b'{"a":1}'] * 50 + [b'{"a":2}'] * 50
    assert 0 < result.percentile_ms(50) <= result.percentile_ms(100) < result.seconds * 1000
    assert result.headers_ms == {"x-queue-ms": 0.5}
    assert result.requests_per_s == pytest.approx(100 / result.seconds)


def test_open_loop_keeps_to_its_rate_and_several_processes_run_together(url: str) -> None:
    spec = LoadSpec(url=url, path="/good", bodies=["{}"], concurrency=16, rate=200, num_requests=100, num_warmup=2)
    results = run_load([spec, spec])
    assert [len(result.latencies_ms) for result in results] == [100, 100]
    assert all(50 < result.requests_per_s < 400 for result in results)


def test_time_bounds_a_run(url: str) -> None:
    spec = LoadSpec(url=url, path="/good", bodies=["{}"], num_requests=10**9, max_seconds=0.3, num_warmup=0)
    result = run_one(spec)
    assert 0.3 <= result.seconds < 60  # and not for ever


def test_failures_are_counted_and_said(url: str) -> None:
    spec = LoadSpec(url=url, path="/bad", bodies=["{}"], num_requests=3, num_warmup=0)
    assert run_load([spec])[0].errors == {'400: {"error": {"message": "no"}}': 3}
    with pytest.raises(LoadError, match="400"):
        run_one(spec)


def test_no_server_and_no_remote_server_and_no_work() -> None:
    with pytest.raises(LoadError, match="refused"):
        run_one(LoadSpec(url="http://127.0.0.1:9", path="/", bodies=["{}"]))
    with pytest.raises(LoadError, match="loopback only"):
        check_spec(LoadSpec(url="http://192.0.2.1", path="/", bodies=["{}"]))
    assert check_spec(LoadSpec(url="http://192.0.2.1", path="/", bodies=["{}"], allow_remote=True)).port == 80
    with pytest.raises(LoadError, match="needs bodies"):
        check_spec(LoadSpec(url="http://127.0.0.1", path="/", bodies=[]))


def test_means_of_timing_headers() -> None:
    heads = [b"HTTP/1.1 200 OK\r\nX-Queue-Ms: 1\r\nOther: 2", b"HTTP/1.1 200 OK\r\nX-Queue-Ms: 2"]
    assert header_means([Response(200, head, b"") for head in heads]) == {"x-queue-ms": 1.5}
