"""HTTP/1.1 clients that cost as little as possible, so that a measurement is of the server.

One incremental parser, and over it a blocking keep-alive connection and an asyncio one. Only what a benchmark
meets: no redirects, no compression, one request at a time on a connection.
"""

import asyncio
import select
import socket
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from msgspec import Struct

MAX_HEAD_BYTES = 65_536


class HttpError(RuntimeError):
    """The peer spoke no HTTP, or closed in the middle of an answer."""


class Response(Struct, frozen=True):
    status: int
    head: bytes  # status line and headers, as they came
    body: bytes

    def header(self, name: str) -> str | None:
        return self.headers().get(name.lower())

    def headers(self) -> dict[str, str]:
        """Headers by lower-case name."""
        pairs = (line.partition(":") for line in self.head.decode("latin-1").split("\r\n")[1:])
        return {name.strip().lower(): value.strip() for name, _, value in pairs if name}

    @property
    def keep_alive(self) -> bool:
        return b"\r\nconnection: close" not in self.head.lower()


class ResponseParser:
    """Bytes in, whole responses out; a body comes by Content-Length or in chunks."""

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def pending(self) -> bool:
        """Whether a response has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Response | None:
        """The response that `data` completes. Raises HttpError for what is no response or more than one."""
        self._buffer = self._buffer + data if self._buffer else data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise HttpError(f"no end of headers within {MAX_HEAD_BYTES} bytes")
            return None
        head = self._buffer[:head_end]
        found = self._body(head, head_end + 4)
        if found is None:
            return None
        body, end = found
        if end != len(self._buffer):
            raise HttpError(f"{len(self._buffer) - end} bytes follow a response that nobody asked for")
        self._buffer = b""
        return Response(_status(head), head, body)

    def _body(self, head: bytes, start: int) -> tuple[bytes, int] | None:
        """The body and where it ends; None while it is incomplete."""
        lower = head.lower()
        length_at = lower.find(b"\r\ncontent-length:")
        if length_at >= 0:
            line_end = lower.find(b"\r\n", length_at + 2)
            digits = lower[length_at + 17 : line_end if line_end > 0 else None].strip()
            if not digits.isdigit():
                raise HttpError(f"Content-Length is no number: {digits!r}")
            end = start + int(digits)
            return (self._buffer[start:end], end) if len(self._buffer) >= end else None
        if b"\r\ntransfer-encoding: chunked" in lower:
            return self._chunks(start)
        if _status(head) in (204, 304):
            return b"", start
        raise HttpError("a response has neither Content-Length nor chunks")

    def _chunks(self, at: int) -> tuple[bytes, int] | None:
        parts: list[bytes] = []
        while (line_end := self._buffer.find(b"\r\n", at)) >= 0:
            size_text = self._buffer[at:line_end].partition(b";")[0].strip()
            try:
                size = int(size_text, 16)
            except ValueError:
                raise HttpError(f"chunk size is no number: {size_text!r}") from None
            start = line_end + 2
            if len(self._buffer) < start + size + 2:
                return None
            if size == 0:
                return b"".join(parts), start + 2
            parts.append(self._buffer[start : start + size])
            at = start + size + 2
        return None


class Address(Struct, frozen=True):
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Address":
        """Raises ValueError for anything but http://host[:port]."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not http://host[:port]")
        return cls(parts.hostname, parts.port or 80)

    @property
    def loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def encode_request(address: Address, path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """A POST of JSON, or a GET where `body` is empty, ready to be sent."""
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", f"Host: {address.host}:{address.port}"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Connection:
    """A blocking keep-alive connection; connects when first used, and again after the server closed it."""

    def __init__(self, address: Address, timeout_s: float = 60.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def request(self, request: bytes) -> Response:
        """Sends bytes of `encode_request` and waits for the answer. Raises HttpError, OSError (TimeoutError)."""
        try:
            if self.readable_within(0):  # idle, so it can only be the server's close after its keep-alive time
                self.close()
            response = self._exchange(request)
        except BaseException:
            self.close()
            raise
        if not response.keep_alive:
            self.close()
        return response

    def readable_within(self, seconds: float) -> bool:
        """Whether an open connection has something to read, its end included."""
        return self._socket is not None and bool(select.select([self._socket], [], [], seconds)[0])

    def _exchange(self, request: bytes) -> Response:
        if self._socket is None:
            self._socket = socket.create_connection((self._address.host, self._address.port), self._timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(request)
        parser = ResponseParser()
        while data := self._socket.recv(1 << 18):
            if (response := parser.feed(data)) is not None:
                return response
        raise HttpError("the server closed the connection before its answer was complete")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncConnection(asyncio.Protocol):
    """The same without blocking: `send`, and `on_answer(connection, response or error)` is called once for it."""

    def __init__(self, on_answer: "Callable[[AsyncConnection, Response | HttpError], None]") -> None:
        self.started = 0.0  # for the caller's use
        self._on_answer = on_answer
        self._parser = ResponseParser()
        self._waiting = False
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls, address: Address, on_answer: "Callable[[AsyncConnection, Response | HttpError], None]"
    ) -> "AsyncConnection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(on_answer), address.host, address.port)
        return connection

    @property
    def closed(self) -> bool:
        return self._transport is None

    def send(self, request: bytes) -> None:
        assert self._transport is not None, "the connection is closed: open another"
        self._waiting = True
        self._transport.write(request)

    def close(self) -> None:
        self._waiting = False
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def data_received(self, data: bytes) -> None:
        try:
            response = self._parser.feed(data)
        except HttpError as error:
            self._fail(error)
            return
        if response is not None:
            if not response.keep_alive:
                self._transport = None
            self._waiting = False
            self._on_answer(self, response)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiting:
            self._fail(HttpError(f"connection lost: {exc or 'closed by the server'}"))

    def _fail(self, error: HttpError) -> None:
        self.close()
        self._on_answer(self, error)


def _status(head: bytes) -> int:
    version, _, rest = head.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise HttpError(f"no HTTP/1 status line: {head[:60]!r}")
    return int(rest[:3])
