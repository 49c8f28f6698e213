"""An answer that is sent while it is made, as server-sent events. Knows HTTP, and nothing of what the events say.

The answer begins with the first event, or with the first keep-alive comment where that takes long: until then an error
is an answer of its own, with its status. From then on the status is 200 and an error is the last event. A client that
reads slowly holds up its own stream only: no more than aiohttp's and the transport's buffers (about 128 KiB) are kept
for it here.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from gateway.errors import GatewayError, render_error
from gateway.limits import request_id

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies that hold answers back look for this
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LAST_WORD_S = 1.0  # how long a client that does not read may hold up its error event


@contextlib.contextmanager
def every(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Calls `call` at that interval for as long as the context lasts."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal timer
        timer = loop.call_later(seconds, tick)
        call()

    timer = loop.call_later(seconds, tick)
    try:
        yield
    finally:
        timer.cancel()


class EventStream:
    def __init__(self, request: web.BaseRequest, headers: dict[str, str]) -> None:
        self.response = web.StreamResponse(headers=headers | HEADERS)
        if (given := request_id(request)) is not None:
            self.response.headers["X-Request-Id"] = given
        self._request = request
        self._writer: AbstractStreamWriter | None = None  # once the answer has begun
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()

    def quiet_s(self) -> float:
        """Since the last event, or since the request's begin."""
        return self._loop.time() - self._sent_at

    async def send(self, events: bytes) -> None:
        """Waits while the client has too much unread. Raises ConnectionError when it is gone."""
        if self._writer is None:
            self._request[EVENTS] = self
            self._writer = await self.response.prepare(self._request)
            assert self._writer is not None, "an answer is prepared once"
        self._sent_at = self._loop.time()
        await self._writer.write(events)

    async def end(self) -> None:
        await self.response.write_eof(DONE)

    async def fail(self, error: GatewayError) -> None:
        """The error as the last event; the connection is cut if the client does not take it."""
        transport = self._request.transport
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self.response.write(b"data: %b\n\n" % render_error(error))
                await self.response.write_eof()
        except TimeoutError:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError("the client does not read") from None


EVENTS = web.RequestKey("events", EventStream)
