"""The log: one JSON line an event, never content, never blocking."""

import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from services.log import CONTENT_FIELDS, MAX_LINE_BYTES, Log, capture_logging

SECRET = "the patient's name is Vasquez"


class Pipe:
    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)

    def text(self) -> str:
        try:
            return os.read(self.read_fd, 1 << 20).decode()
        except BlockingIOError:
            return ""

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.read_fd)
    os.close(made.write_fd)


@pytest.fixture
def log(pipe: Pipe) -> Log:
    return Log("gateway-0", pipe.write_fd)


def test_a_line(log: Log, pipe: Pipe) -> None:
    log("ready", port=8080, load_ms=1.5, path=Path("/x"), ok=True, nothing=None, names=["a"])
    (line,) = pipe.lines()
    assert line.pop("ts").endswith("Z")
    assert 0 < line.pop("up_ms") < 3_600_000
    assert line == {
        "level": "info", "process": "gateway-0", "event": "ready", "port": 8080, "load_ms": 1.5, "path": "/x",
        "ok": True, "nothing": None, "names": ["a"],
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONTENT_FIELDS) + ["Input", "PROMPT"])
def test_content_is_withheld_by_name(name: str, log: Log, pipe: Pipe) -> None:
    log("request", **{name: SECRET})
    log("request", detail={name: [SECRET]})
    text = pipe.text()
    assert "Vasquez" not in text
    assert text.count("withheld") == 2


@pytest.mark.parametrize(
    "value",
    [
        SECRET.encode(),
        bytearray(SECRET.encode()),
        memoryview(SECRET.encode()),
        np.full(4, 0.123456),
        [0.123456] * 384,
        tuple(range(123456, 123500)),
        {"deep": {"er": [0.123456] * 9}},
        msgspec.defstruct("Chunk", ["text"])(SECRET),
    ],
)
def test_raw_data_is_named_not_shown(value: object, log: Log, pipe: Pipe) -> None:
    log("step", detail=value)
    text = pipe.text()
    assert "step" in text
    assert "Vasquez" not in text
    assert "123456" not in text


def test_long_text_and_long_lines_are_cut(log: Log, pipe: Pipe) -> None:
    log("a", note="x" * 5000)
    log("b", **{f"note_{i}": "x" * 900 for i in range(20)})
    log("c" * 9000)
    text = pipe.text()
    first, second = (json.loads(line) for line in text.splitlines()[:2])
    assert first["note"].endswith("(5000 characters)")
    assert second == {**second, "event": "b", "truncated": True}
    assert all(len(line) <= MAX_LINE_BYTES for line in text.splitlines())


@pytest.mark.parametrize("value", [2**70, "\ud800", float("nan"), {1: 2}, {"a": {"b": object()}}])
def test_odd_values_never_raise(value: object, log: Log, pipe: Pipe) -> None:
    log("odd", value=value)
    (line,) = pipe.lines()
    assert line["event"] in ("odd", "unloggable")


def test_fields_cannot_forge_the_head(log: Log, pipe: Pipe) -> None:
    log("x", ts="never", process="other")
    log("line\nbreak", note='"\n{"event":"forged"}')
    first, second = pipe.lines()
    assert (first["process"], second["event"]) == ("gateway-0", "line\nbreak")
    assert first["ts"] != "never"


def test_a_full_pipe_costs_lines_not_time(log: Log, pipe: Pipe) -> None:
    for _ in range(1000):
        log("flood", note="x" * 500)
    assert len(pipe.lines()) < 1000
    log("after")
    (line,) = pipe.lines()
    assert line["dropped_lines"] > 0
    log("next")
    assert "dropped_lines" not in pipe.lines()[0]


def test_a_closed_descriptor_is_survived() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    os.close(write_fd)
    Log("x", write_fd)("gone")


def test_an_exception_shows_calls_not_values(log: Log, pipe: Pipe) -> None:
    def fail(document: str) -> None:
        raise RuntimeError("bad row 3")

    try:
        fail(SECRET)
    except RuntimeError as error:
        log.failure("crashed", error)
    (line,) = pipe.lines()
    assert line["error"] == "RuntimeError: bad row 3"
    assert line["calls"][-1].endswith("fail")
    assert "Vasquez" not in json.dumps(line)


def test_libraries_log_into_the_same_lines(log: Log, pipe: Pipe) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        capture_logging(log)
        logging.getLogger("asyncio").error("slow callback")
        logging.getLogger("asyncio").info("not this")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", stacklevel=1)
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        root.setLevel(level)
    first, second = pipe.lines()
    assert (first["event"], first["level"], first["message"]) == ("asyncio", "error", "slow callback")
    assert "careful" in second["message"]


def test_the_start_of_a_process() -> None:
    code = "import time; from services.log import process_start_time as start; print(time.time() - start())"
    began = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert -0.05 < age < time.monotonic() - began + 0.05
