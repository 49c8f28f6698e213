"""An answer that comes as server-sent events: bytes in, events out as soon as they are whole. No sockets."""

from bench.client import MAX_HEAD_BYTES, HttpError, Response

END = b"[DONE]"


class StreamParser:
    """One streamed answer. `done` once it has ended; a refusal is `refused` and has no events."""

    def __init__(self) -> None:
        self.done = False
        self._buffer = b""  # not yet taken apart
        self._head: bytes | None = None
        self._body = b""  # out of its chunks, not yet an event
        self._left: int | None = None  # of a body with Content-Length

    @property
    def status(self) -> int:
        """0 before the headers are there."""
        return 0 if self._head is None else int(self._head[9:12])

    @property
    def refused(self) -> Response | None:
        """A whole answer with another status than 200."""
        return Response(self.status, self._head or b"", self._body) if self.done and self.status != 200 else None

    @property
    def keep_alive(self) -> bool:
        return self._head is not None and b"\r\nconnection: close" not in self._head.lower()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that `data` completes, `[DONE]` left out. Raises HttpError."""
        self._buffer += data
        if self._head is None and not self._read_head():
            return []
        if self._left is None:
            self._dechunk()
        else:
            self._body, self._buffer = self._body + self._buffer, b""
            self.done = len(self._body) >= self._left
        if self.status != 200:
            return []
        *events, self._body = self._body.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event)) not in (b"", END)]

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise HttpError(f"no end of headers within {MAX_HEAD_BYTES} bytes")
            return False
        self._head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        if not self._head.startswith(b"HTTP/1.") or not self._head[9:12].isdigit():
            raise HttpError(f"no HTTP/1 status line: {self._head[:60]!r}")
        lower = self._head.lower()
        if b"\r\ntransfer-encoding: chunked" not in lower:
            _, found, rest = lower.partition(b"\r\ncontent-length:")
            digits = rest.partition(b"\r\n")[0].strip()
            if not found or not digits.isdigit():
                raise HttpError("an answer has neither Content-Length nor chunks")
            self._left = int(digits)
        return True

    def _dechunk(self) -> None:
        """Moves what whole chunks hold from the buffer to the body."""
        at = 0
        while not self.done and (line_end := self._buffer.find(b"\r\n", at)) >= 0:
            try:
                size = int(self._buffer[at:line_end].partition(b";")[0], 16)
            except ValueError:
                raise HttpError(f"chunk size is no number: {self._buffer[at:line_end][:40]!r}") from None
            start = line_end + 2
            if len(self._buffer) < start + size + 2:
                break
            self._body += self._buffer[start : start + size]
            self.done = size == 0
            at = start + size + 2
        self._buffer = self._buffer[at:]


def _payload(event: bytes) -> bytes:
    """The data of one event; b"" for a comment."""
    lines = (line for line in event.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].strip() for line in lines)
