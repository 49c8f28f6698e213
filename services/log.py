"""JSON logs: one line an event, on standard output. What users send and what models answer never gets in.

    {"ts": "…", "level": "info", "process": "gateway-0", "event": "ready", "up_ms": 412, …fields}

`up_ms` is the time since the process was started, so that a start can be read off phase by phase.
"""

import logging
import os
import select
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

MAX_LINE_BYTES = 4096  # PIPE_BUF: such a write is whole, and never blocks on a pipe that polls writable
MAX_TEXT = 1000
WITHHELD = "(withheld)"

# names under which content might come by; a line never shows their values
CONTENT_FIELDS = frozenset(
    ("ids", "input", "inputs", "input_ids", "token_ids", "text", "texts", "text_1", "text_2", "prompt", "prompts")
    + ("query", "queries", "document", "documents", "content", "messages", "body", "row", "rows", "scores")
    + ("vector", "vectors", "embedding", "embeddings", "output", "outputs", "api_key", "authorization")
)


class Log:
    """Called as `log("event", level="info", key=value, …)`. Never raises, never blocks: a full pipe costs the line."""

    def __init__(self, process: str, fd: int = 1) -> None:
        self.process = process
        self._fd = fd
        self._started = process_start_time()
        self._dropped = 0

    def __call__(self, event: str, *, level: str = "info", **fields: Any) -> None:
        head: dict[str, Any] = {
            "ts": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": level,
            "process": self.process,
            "event": event,
            "up_ms": round((time.time() - self._started) * 1000),
        }
        if self._dropped:
            head["dropped_lines"] = self._dropped
        line = _encode({**head, **{key: _safe(key, value) for key, value in fields.items() if key not in head}})
        if len(line) > MAX_LINE_BYTES:
            line = _encode({**head, "truncated": True})[:MAX_LINE_BYTES]
        self._write(line)

    def failure(self, event: str, error: BaseException) -> None:
        """An exception as one line: its type, its text and the calls that led there, without their values."""
        frames = traceback.extract_tb(error.__traceback__)[-12:]
        calls = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
        self(event, level="error", error=f"{type(error).__name__}: {error}", calls=calls)

    def _write(self, line: bytes) -> None:
        try:
            writable = select.select([], [self._fd], [], 0)[1]
            if writable and os.write(self._fd, line):
                self._dropped = 0
            else:
                self._dropped += 1
        except (OSError, ValueError):
            self._dropped += 1


class LogHandler(logging.Handler):
    """Brings what libraries say through `logging` into the same lines."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._log.failure(record.name, error)
        else:
            self._log(record.name, level=record.levelname.lower(), message=record.getMessage())


def capture_logging(log: Log) -> None:
    """Sends warnings and worse of every library, and Python's own warnings, to `log`."""
    logging.basicConfig(handlers=[LogHandler(log)], level=logging.WARNING, force=True)
    logging.captureWarnings(True)


def process_start_time() -> float:
    """When the kernel started this process, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def _safe(key: str, value: Any) -> Any:
    if key.lower() in CONTENT_FIELDS:
        return WITHHELD
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… ({len(value)} characters)"
        case dict():
            return {str(name): _safe(str(name), item) for name, item in list(value.items())[:64]}
        case list() | tuple() | set() | frozenset():
            items = list(value)
            if len(items) > 8 and all(isinstance(item, int | float) for item in items):
                return f"<{len(items)} numbers>"  # token ids or a vector, whatever they call themselves
            return [_safe("", item) for item in items[:32]] + ([f"… {len(items)} in all"] if len(items) > 32 else [])
        case os.PathLike():
            return os.fspath(value)
        case _:  # bytes, arrays and tensors among them: the type alone
            return f"<{type(value).__name__}>"


def _encode(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # lone surrogates, endless nesting
        kept = {key: fields[key] for key in ("ts", "level", "process", "up_ms")}
        return msgspec.json.encode({**kept, "event": "unloggable", "error": type(error).__name__}) + b"\n"
