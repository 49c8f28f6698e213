"""The status table and the greeting, of a stack whose processes are imagined."""

from pathlib import Path
from typing import Any

import pytest

from ipc.addresses import crash_file
from ipc.control import Status
from ipc.types import ModelFacts
from services import greeting, status
from services.config import RunConfig, ServiceConfig, build_config
from services.crash_guard import CrashGuard
from services.stack import write_stack
from services.supervisor_client import ProcessInfo

FACTS: dict[str, Any] = {
    "architecture": "BertModel", "vocab_size": 10, "max_model_len": 256, "dimension": 384, "max_num_seqs": 1,
    "max_num_batched_tokens": 8,
}  # fmt: skip


class Client:
    def __init__(self, run_dir: Path) -> None:
        pass

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def processes(self) -> list[ProcessInfo]:
        return [
            ProcessInfo("gateways", "gateway-0", "RUNNING", 11, 1000, 4725, 0),
            ProcessInfo("m-0", "scheduler", "BACKOFF", 0, 1000, 2000, 1),
        ]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    models = [{"name": name, "source": f"/{name}", "rank": {"device": "cpu"}} for name in ("m", "n")]
    made = build_config({"models": models, "gateway": {"num_gateways": 1, "port": 1}}, Path("/"), tmp_path)
    write_stack(made, {"m": Path("/m"), "n": Path("/n")})
    monkeypatch.setattr(status, "SupervisorClient", Client)
    return made


def answer(run_dir: Path, replica: str) -> Status | None:
    if replica == "n/0":
        return None
    facts = ModelFacts(name="m", task="embed", **FACTS)
    return Status(incarnation=1, state="ready", facts=facts, num_requests=2, num_tokens=30, forward_age_ms=1500)


def test_the_table(config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = Path(config.run_dir)
    monkeypatch.setattr(status, "replica_status", answer)
    monkeypatch.setattr(status, "http_ready", lambda host, port: (False, "n: no replica is ready"))
    for _ in range(3):
        CrashGuard(crash_file(run_dir, "m-0-scheduler"), sleep=lambda seconds: None).begin()
    CrashGuard(crash_file(run_dir, "m-0-scheduler")).refuse("broken")
    said: list[str] = []
    assert status.print_status(RunConfig(config, {}), said.append) == 1
    rows = [line.split() for line in said[0].splitlines()]
    assert ["gateways:gateway-0", "RUNNING", "11", "1:02:05", "0"] in rows
    assert ["m-0:scheduler", "BACKOFF", "(cannot", "boot)", "-", "0:00:00", "2"] in rows
    assert ["m-0:rank-0", "MISSING", "-", "-", "0"] in rows
    text = [" ".join(row) for row in rows]
    assert "m/0 ready 2 30 1.5 s ago BertModel, embed, 384 × float32, 256 tokens, cpu" in text
    assert "n/0 silent - - - -" in text
    assert said[0].endswith("http://127.0.0.1:1  NOT READY: n: no replica is ready")


def test_a_stack_that_serves_is_code_zero(config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "replica_status", answer)
    monkeypatch.setattr(status, "http_ready", lambda host, port: (True, ""))
    said: list[str] = []
    assert status.print_status(RunConfig(config, {}), said.append) == 0
    assert said[0].endswith("http://127.0.0.1:1  ready")


def test_the_greeting_fits_each_models_task(config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def tasks(run_dir: Path, replica: str) -> Status:
        facts = ModelFacts(name="x", task="embed" if replica == "m/0" else "score", **FACTS)
        return Status(incarnation=1, state="ready", facts=facts)

    monkeypatch.setattr(greeting, "replica_status", tasks)
    text = greeting.greeting(config)
    assert text.startswith("Bouquet serves on http://127.0.0.1:1\n")
    requests = [(line.split("/v1/")[1].split()[0], line) for line in text.splitlines() if "/v1/" in line]
    assert [path for path, _ in requests] == ["embeddings", "rerank", "rerank", "models"]
    assert text.count('"model": "n"') == 1


def test_a_language_model(config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def language_model(run_dir: Path, replica: str) -> Status:
        facts = ModelFacts(name="x", task="generate", num_blocks=64, **FACTS)
        return Status(incarnation=1, state="ready", facts=facts)

    monkeypatch.setattr(greeting, "replica_status", language_model)
    monkeypatch.setattr(status, "replica_status", language_model)
    monkeypatch.setattr(status, "http_ready", lambda host, port: (True, ""))
    said: list[str] = []
    status.print_status(RunConfig(config, {}), said.append)
    assert "BertModel, generate, float32, 64 blocks of 16 tokens, 256 tokens, cpu" in said[0]
    text = greeting.greeting(config)
    assert text.count("curl -sN http://127.0.0.1:1/v1/chat/completions") == 2
    assert text.count('"temperature": 0') == 2
    assert "/v1/embeddings" not in text
