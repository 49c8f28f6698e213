"""Reads what the processes log, as it is written. Knows the line format, not what the events mean."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

MAX_READ_BYTES = 1 << 20


class Line(Struct, frozen=True):
    """One line of a program's log; `fields` is empty for a line that is not one of ours."""

    program: str
    text: str
    fields: dict[str, Any]

    @property
    def level(self) -> str:
        return str(self.fields.get("level", ""))

    @property
    def event(self) -> str:
        return str(self.fields.get("event", ""))


class LogTail:
    """New lines of every program's log in `logs_dir` since the last look; survives rotation."""

    def __init__(self, logs_dir: Path) -> None:
        self._dir = logs_dir
        self._offsets: dict[str, tuple[int, int]] = {}  # file name → (inode, bytes read)
        for path in self._files():
            status = path.stat()
            self._offsets[path.name] = (status.st_ino, status.st_size)

    def lines(self) -> Iterator[Line]:
        for path in self._files():
            for text in self._new_text(path).splitlines():
                yield parse_line(path.stem, text)

    def _files(self) -> list[Path]:
        return sorted(path for path in self._dir.glob("*.log") if path.name != "supervisord.log")

    def _new_text(self, path: Path) -> str:
        """Whole lines only; the rest waits for its end."""
        try:
            with path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                known, offset = self._offsets.get(path.name, (inode, 0))
                if known != inode or offset > os.fstat(file.fileno()).st_size:
                    offset = 0
                file.seek(offset)
                data = file.read(MAX_READ_BYTES)
        except FileNotFoundError:  # rotated under our hands
            return ""
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == MAX_READ_BYTES:
            end = len(data)
        self._offsets[path.name] = (inode, offset + end)
        return data[:end].decode("utf-8", "replace")


def parse_line(program: str, text: str) -> Line:
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        fields = {}
    return Line(program, text, fields if "event" in fields else {})


def last_lines(path: Path, count: int = 10) -> list[str]:
    """The end of a log file, for a person to read; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


def describe(line: Line) -> str:
    """A line for a terminal: the event and its fields in few words."""
    if not line.fields:
        return line.text
    shown = {
        key: value for key, value in line.fields.items() if key not in ("ts", "level", "process", "event", "up_ms")
    }
    message = shown.pop("message", "")
    words = [line.event, *([str(message)] if message else []), *(f"{key}={value}" for key, value in shown.items())]
    return "  ".join(words)
