"""A whole answer over HTTP/1.x, head and body written at once; and an error as one. Knows nothing of what it says."""

from aiohttp import web
from aiohttp.hdrs import METH_HEAD
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE

from gateway.errors import GatewayError, error_headers, kind_of, render_error

JSON_HEADERS = {"Content-Type": "application/json"}


class Answer(web.StreamResponse):
    """For statuses that have a body. aiohttp's own Response does the same in three times the calls: it can do more."""

    def __init__(self, body: bytes, headers: dict[str, str] = JSON_HEADERS, status: int = 200) -> None:
        """`headers` are without those that every answer has."""
        super().__init__(status=status, headers=headers)
        self._answer = body
        self._request: web.BaseRequest | None = None

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is written before the body is."""
        self._request = request

    async def write_eof(self, data: bytes = b"") -> None:
        """Waits while the client has too much unread. Raises ConnectionError when it is gone."""
        request, headers = self._request, self.headers
        assert request is not None, "prepare() comes first"
        writer, (major, minor) = request.writer, request.version
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        headers["Content-Length"] = str(len(self._answer))
        headers["Date"] = rfc822_formatted_time()
        headers["Server"] = SERVER_SOFTWARE
        if self._keep_alive != (minor == 1):  # otherwise than the version says by itself
            headers["Connection"] = "keep-alive" if self._keep_alive else "close"
        await writer.write_headers(f"HTTP/{major}.{minor} {self._status} {self._reason}", headers)
        await writer.write_eof(b"" if request.method == METH_HEAD else self._answer)


def error_answer(error: GatewayError) -> Answer:
    return Answer(render_error(error), JSON_HEADERS | error_headers(error), kind_of(error).status)
