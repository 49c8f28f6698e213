"""The raw HTTP client against a local server that answers in every way a server may."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from bench.client import Address, AsyncConnection, Connection, HttpError, Response, ResponseParser, encode_request

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Queue-Ms: 0.25\r\nContent-Length: 7\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n3;x=y\r\nefg\r\n0\r\n\r\n"


class Server:
    """Answers the n-th request with the n-th of `answers`, in pieces; closes where an answer says so."""

    def __init__(self, answers: list[bytes], piece: int = 1 << 20) -> None:
        self.num_connections = 0
        self._answers = iter(answers)
        self._piece = piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            with connection:
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        while connection.recv(65536):
            answer = next(self._answers, None)
            if answer is None:
                return
            for start in range(0, len(answer), self._piece):
                connection.sendall(answer[start : start + self._piece])
            if b"connection: close" in answer.lower() or answer.endswith((b"CUT", b"quietly")):
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[object]:
    servers: list[Server] = []

    def start(answers: list[bytes], piece: int = 1 << 20) -> Server:
        servers.append(Server(answers, piece))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("answer", [PLAIN + b"abcdefg", CHUNKED])
@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_parser_gives_the_same_response_however_it_is_cut(answer: bytes, piece: int) -> None:
    parser = ResponseParser()
    pieces = [answer[start : start + piece] for start in range(0, len(answer), piece)]
    found = [parser.feed(data) for data in pieces]
    assert all(response is None for response in found[:-1])
    response = found[-1]
    assert response is not None
    assert (response.status, response.body, parser.pending) == (200, b"abcdefg", False)


def test_headers_are_read_without_regard_to_case() -> None:
    response = ResponseParser().feed(PLAIN.replace(b"Content-Length", b"content-LENGTH") + b"abcdefg")
    assert response is not None
    assert response.header("x-queue-MS") == "0.25"
    assert response.keep_alive


def test_no_body_without_a_length_only_where_there_is_none() -> None:
    response = ResponseParser().feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert response is not None
    assert (response.status, response.body) == (204, b"")
    with pytest.raises(HttpError, match="neither Content-Length nor chunks"):
        ResponseParser().feed(b"HTTP/1.1 200 OK\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-x\r\n\r\n", "neither|status line"),
        (PLAIN + b"abcdefgh", "1 bytes follow"),
        (PLAIN.replace(b": 7", b": x") + b"abcdefg", "no number"),
        (CHUNKED.replace(b"3;x=y", b"z"), "chunk size"),
        (b"H" * 70_000, "no end of headers"),
    ],
)
def test_what_is_no_response_is_an_error(answer: bytes, reason: str) -> None:
    with pytest.raises(HttpError, match=reason):
        ResponseParser().feed(answer)


def test_connection_is_kept_and_opened_again_after_the_server_closed_it(serve) -> None:  # type: ignore[no-untyped-def]
    closing = PLAIN.replace(b"Content-Type", b"Connection: close\r\nContent-Type") + b"abcdefg"
    server = serve([PLAIN + b"abcdefg", CHUNKED, closing, PLAIN + b"again!!"], piece=5)
    request = encode_request(server.address, "/x", b"{}")
    with Connection(server.address, 5) as connection:
        bodies = [connection.request(request).body for _ in range(4)]
    assert bodies == [b"abcdefg", b"abcdefg", b"abcdefg", b"again!!"]
    assert server.num_connections == 2


def test_a_connection_closed_while_idle_is_opened_again(serve) -> None:  # type: ignore[no-untyped-def]
    server = serve([PLAIN + b"quietly", PLAIN + b"abcdefg"])
    request = encode_request(server.address, "/x", b"{}")
    with Connection(server.address, 5) as connection:
        assert connection.request(request).body == b"quietly"
        assert connection.readable_within(5)
        assert connection.request(request).body == b"abcdefg"
    assert server.num_connections == 2


def test_an_answer_cut_short_is_an_error_and_the_next_request_connects_again(serve) -> None:  # type: ignore[no-untyped-def]
    server = serve([PLAIN + b"CUT", PLAIN + b"abcdefg"])
    request = encode_request(server.address, "/x", b"")
    with Connection(server.address, 5) as connection:
        with pytest.raises(HttpError, match="closed the connection"):
            connection.request(request)
        assert connection.request(request).body == b"abcdefg"


def test_async_connection_reports_answers_and_loss(serve) -> None:  # type: ignore[no-untyped-def]
    server = serve([PLAIN + b"abcdefg", PLAIN + b"CUT"], piece=4)

    async def talk() -> list[Response | HttpError]:
        answers: asyncio.Queue[Response | HttpError] = asyncio.Queue()
        connection = await AsyncConnection.open(server.address, lambda _, answer: answers.put_nowait(answer))
        found = []
        for _ in range(2):
            connection.send(encode_request(server.address, "/x", b"{}"))
            found.append(await asyncio.wait_for(answers.get(), 5))
        assert connection.closed
        return found

    good, bad = asyncio.run(talk())
    assert isinstance(good, Response)
    assert good.body == b"abcdefg"
    assert isinstance(bad, HttpError)


def test_request_bytes_and_addresses() -> None:
    address = Address.of("http://127.0.0.1:8080")
    assert address == Address("127.0.0.1", 8080)
    assert address.loopback
    assert not Address.of("http://example.org").loopback
    with pytest.raises(ValueError, match="not http"):
        Address.of("https://127.0.0.1")
    request = encode_request(address, "/v1/x", b"{}", {"X-Priority": "bulk"})
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /v1/x HTTP/1.1"
    assert {b"Host: 127.0.0.1:8080", b"Content-Length: 2", b"X-Priority: bulk"} <= set(head.split(b"\r\n"))
    assert body == b"{}"
    assert encode_request(address, "/health", b"").startswith(b"GET /health HTTP/1.1\r\n")
