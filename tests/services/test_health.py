"""Asking a scheduler and a gateway how they are, against small real ones."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import zmq

from ipc.addresses import gateway_endpoint, replica_dir
from ipc.codec import TO_SCHEDULER, encode
from ipc.control import Hello, Quarantine, ReplicaState, Status
from ipc.sockets import router
from ipc.types import ModelFacts
from services.health import http_ready, is_ready, reachable, replica_status

FACTS = ModelFacts(
    name="m", architecture="BertModel", task="embed", vocab_size=10, max_model_len=8, dimension=4, max_num_seqs=1,
    max_num_batched_tokens=8,
)  # fmt: skip


@contextmanager
def scheduler(run_dir: Path, answers: list[bytes]) -> Iterator[list[Hello]]:
    """Answers the first message it gets with all of `answers`; yields what it heard."""
    replica_dir(run_dir, "m/0").mkdir(parents=True)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = router(context, gateway_endpoint(run_dir, "m/0"))
    heard: list[Hello] = []

    def answer() -> None:
        if socket.poll(5000):
            frames = socket.receive()
            assert frames is not None
            message = TO_SCHEDULER.decode(frames[-1])
            assert isinstance(message, Hello)
            heard.append(message)
            for data in answers:
                socket.send([frames[0], data])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield heard
    finally:
        thread.join()
        socket.close()
        context.destroy(linger=0)


def test_a_scheduler_tells_its_status(tmp_path: Path) -> None:
    status = Status(incarnation=5, state="ready", facts=FACTS, num_requests=2, forward_age_ms=7)
    noise = [b"\xc1 not msgpack", encode(Quarantine(fingerprints=[], ttl_ms=1))]
    with scheduler(tmp_path, [*noise, encode(status)]) as heard:
        assert replica_status(tmp_path, "m/0", timeout_s=5) == status
    assert heard[0].role == "gateway"


def test_a_scheduler_that_says_nothing_and_one_that_is_not_there(tmp_path: Path) -> None:
    assert replica_status(tmp_path, "m/1", timeout_s=0.1) is None
    with scheduler(tmp_path, []):
        assert replica_status(tmp_path, "m/0", timeout_s=0.3) is None


@pytest.mark.parametrize(
    ("state", "age_ms", "ready"),
    [("ready", 0, True), ("ready", 100, True), ("ready", 101, False), ("ready", -1, False), ("starting", 5, False)],
)
def test_ready_is_a_recent_forward_pass(state: ReplicaState, age_ms: int, ready: bool) -> None:
    assert is_ready(Status(incarnation=1, state=state, forward_age_ms=age_ms, max_forward_age_ms=100)) is ready
    assert not is_ready(None)


@contextmanager
def gateway(status: int, body: bytes) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"status": "ready"}, (True, "")),
        (503, {"error": {"message": "m: no replica"}}, (False, "m: no replica")),
        (503, {"error": "plain"}, (False, "plain")),
        (503, ["odd"], (False, "['odd']")),
        (404, None, (False, "None")),
    ],
)
def test_a_gateway_tells_why_not(status: int, body: object, expected: tuple[bool, str]) -> None:
    with gateway(status, json.dumps(body).encode()) as port:
        assert http_ready("0.0.0.0", port) == expected


def test_a_gateway_that_talks_nonsense_or_is_not_there() -> None:
    with gateway(503, b"<html>") as port:
        assert http_ready("127.0.0.1", port)[0] is False
    ready, reason = http_ready("127.0.0.1", port)
    assert not ready
    assert "refused" in reason


def test_an_address_to_connect_to() -> None:
    assert [reachable(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == ["127.0.0.1", "::1", "10.0.0.1"]
