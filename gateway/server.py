"""The HTTP server under the application: connections, their limits in time, and the order of stopping.

aiohttp has no time limit for a request's head. Here a new connection must have sent its first one within
`header_timeout_ms`; later heads of a kept connection are bounded by KEEPALIVE_S only. Nor has it one for clients
that do not read their answers: they are cut off after STALLED_S without progress.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from gateway.answer import error_answer
from gateway.config import GatewayConfig
from gateway.errors import InternalError, InvalidRequest, cut

KEEPALIVE_S = 75.0
LINGER_S = 2.0  # how long the rest of a refused body is read and thrown away, so that the client sees the answer
BACKLOG = 1024
SWEEP_S = 1.0
STALLED_S = 30.0
IDLE_DRAIN_S = 1.0  # while draining, kept connections have this long to send a last request


class HttpServer:
    """`handler` gets every request. Make one within a running loop."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], config: GatewayConfig
    ) -> None:
        self._config = config
        make_request = partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=config.max_body_bytes)
        self._server = web.Server(handler, request_factory=make_request, handler_cancellation=True)
        self._silent: dict[web.RequestHandler, float] = {}  # connections without a request yet, since when
        self._unread: dict[web.RequestHandler, tuple[int, float]] = {}  # bytes of answers not taken, since when
        self._listener: socket.socket | None = None
        self._listening: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listener = listener
        self._listening = await loop.create_server(self._connection, sock=listener, backlog=BACKLOG)
        self._sweeper = asyncio.create_task(self._sweep())

    async def drain(self) -> None:
        """Accepts no more, lets kept connections send what they were about to, and waits for all answers."""
        await self._stop_listening()
        loop = asyncio.get_running_loop()
        end = loop.time() + IDLE_DRAIN_S
        while self._server.connections and loop.time() < end:
            await asyncio.sleep(0.02)

    async def _stop_listening(self) -> None:
        """Closes the listener when all that the kernel has queued for it is accepted: the rest would be reset.

        A connection that is made between the last look and the close, some microseconds later, still is.
        """
        if self._listener is None or self._listening is None:
            return
        loop = asyncio.get_running_loop()
        with self._listener.dup() as queue:  # holds it open
            queue.setblocking(False)
            self._listening.close()
            for _ in range(2 * BACKLOG):
                try:
                    connection, _ = queue.accept()
                except OSError:  # none is left, as a rule
                    return
                await loop.connect_accepted_socket(self._connection, connection)

    async def close(self) -> None:
        """Ends idle connections, and waits up to the drain timeout for the others."""
        if self._listening is not None:
            self._listening.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.sleep(0)  # what has just come begins to be handled
        self._server.pre_shutdown()
        await self._server.shutdown(self._config.drain_timeout_ms / 1000)

    def _connection(self) -> asyncio.Protocol:
        loop = asyncio.get_running_loop()
        connection = JsonRequestHandler(
            self._server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # means none
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        self._silent[connection] = loop.time()
        return connection

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = asyncio.get_running_loop().time()
            self._close_silent(now - self._config.header_timeout_ms / 1000)
            self._cut_off_stalled(now)

    def _close_silent(self, oldest: float) -> None:
        """Closes connections that have not sent a request's head in time."""
        for connection, since in list(self._silent.items()):
            if connection.transport is None or _has_spoken(connection):
                del self._silent[connection]
            elif since < oldest:
                connection.force_close()
                del self._silent[connection]

    def _cut_off_stalled(self, now: float) -> None:
        """Aborts connections whose client has taken nothing of its answer for too long."""
        before, self._unread = self._unread, {}
        for connection in self._server.connections:
            transport = connection.transport
            num_bytes = 0 if transport is None else transport.get_write_buffer_size()
            if transport is None or num_bytes == 0:
                continue
            seen, since = before.get(connection, (-1, now))
            if seen == num_bytes and now - since > STALLED_S:
                transport.abort()
            else:
                self._unread[connection] = (num_bytes, since if seen == num_bytes else now)


class JsonRequestHandler(web.RequestHandler):
    """aiohttp's connection, with its own error pages (bad HTTP, mostly) in our shape."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Every body asks for this at its end and when it has been read; few were ever held up."""
        if self._reading_paused or self._buffer_paused:
            super().resume_reading(resume_parser)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status < 500:
            text = (message or "bad HTTP request").partition("\n")[0].rstrip(":")
            answer = error_answer(InvalidRequest(f"not a valid HTTP request: {cut(text, 200)}", code="bad_http"))
        else:
            answer = error_answer(InternalError("the server made an error"))
        answer.force_close()
        return answer


def _has_spoken(connection: web.RequestHandler) -> bool:
    return connection._request_count > 0  # the only place where aiohttp keeps it
