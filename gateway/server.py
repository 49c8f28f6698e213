"""The HTTP server under the application: connections, their limits in time, and the order of stopping.

aiohttp has no time limit for a request's head. Here a new connection must have sent its first one within
`header_timeout_ms`; later heads of a kept connection are bounded by KEEPALIVE_S only. Nor has it one for clients
that do not read their answers: they are cut off after STALLED_S without progress.
"""

import asyncio
import socket

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.middleware import JsonRequestHandler

KEEPALIVE_S = 75.0
LINGER_S = 2.0  # how long the rest of a refused body is read and thrown away, so that the client sees the answer
BACKLOG = 1024
SWEEP_S = 1.0
STALLED_S = 30.0
IDLE_DRAIN_S = 1.0  # while draining, kept connections have this long to send a last request


class HttpServer:
    def __init__(self, app: web.Application, config: GatewayConfig) -> None:
        self._config = config
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=config.drain_timeout_ms / 1000
        )
        self._silent: dict[web.RequestHandler, float] = {}  # connections without a request yet, since when
        self._unread: dict[web.RequestHandler, tuple[int, float]] = {}  # bytes of answers not taken, since when
        self._listener: socket.socket | None = None
        self._listening: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the application; nothing is accepted yet."""
        await self._runner.setup()

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
        server = self._runner.server
        while server is not None and server.connections and loop.time() < end:
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
        """Ends idle connections, waits up to the drain timeout for the others, and stops the application."""
        if self._listening is not None:
            self._listening.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None, "start() comes before listen()"
        loop = asyncio.get_running_loop()
        connection = JsonRequestHandler(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # means none, as in AppRunner
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
        for connection in self._runner.server.connections if self._runner.server else ():
            transport = connection.transport
            num_bytes = 0 if transport is None else transport.get_write_buffer_size()
            if transport is None or num_bytes == 0:
                continue
            seen, since = before.get(connection, (-1, now))
            if seen == num_bytes and now - since > STALLED_S:
                transport.abort()
            else:
                self._unread[connection] = (num_bytes, since if seen == num_bytes else now)


def _has_spoken(connection: web.RequestHandler) -> bool:
    return connection._request_count > 0  # the only place where aiohttp keeps it
