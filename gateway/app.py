"""Ivy, the gateway: which routes there are, and how one process of it lives. Read this first, then handlers.py."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from gateway import health
from gateway.client import SchedulerClient
from gateway.config import GatewayConfig
from gateway.dialects.registry import DIALECTS
from gateway.errors import BadExpectation, MethodNotAllowed, UnknownRoute
from gateway.handlers import task_handler
from gateway.link import Sender
from gateway.metrics import Metrics
from gateway.middleware import error_response, request_middleware
from gateway.models import load_model
from gateway.replicas import ReplicaWatcher
from gateway.server import HttpServer
from gateway.state import GATEWAY, Gateway
from ipc.addresses import replicas_file
from ipc.types import new_incarnation

Log = Callable[..., None]
LAST_WORDS_S = 0.5  # of the drain timeout, for telling clients that their answers will not come
FIRST_STATUS_S = 2.0  # a gateway that starts beside running ones listens only when it knows its replicas


async def serve(
    *, config: GatewayConfig, models: dict[str, Path], run_dir: Path, index: int, stop: asyncio.Event, log: Log
) -> None:
    """One gateway process until `stop` is set; then it answers what is in flight and returns.

    Raises ModelFilesError for a model directory it cannot serve, OSError when the port is taken, and whatever ended
    the watcher of replicas.json.
    """
    with bind(config.host, config.port) as listener:
        app = create_app(config=config, models=models, run_dir=run_dir, index=index, log=log)
        server = HttpServer(app, config)
        await server.start()
        try:
            await app[GATEWAY].client.wait_known(FIRST_STATUS_S)
            await server.listen(listener)
            log("listening", host=config.host, port=listener.getsockname()[1])
            watching = app[GATEWAY].watching
            await _stop_or_end(stop, watching)
            log("draining", in_flight=app[GATEWAY].admission.in_use)
            app[GATEWAY].draining = True
            await server.drain()
        finally:
            drain_s = config.drain_timeout_ms / 1000
            timer = asyncio.get_running_loop().call_later(
                max(drain_s - LAST_WORDS_S, drain_s / 2), app[GATEWAY].client.give_up
            )
            await server.close()
            timer.cancel()
        log("stopped")
        if not watching.cancelled():
            watching.result()  # its error ends the process, which is started anew


async def _stop_or_end(stop: asyncio.Event, watching: "asyncio.Task[None]") -> None:
    """Until a stop is asked for, or the watcher has failed."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()


def create_app(
    *, config: GatewayConfig, models: dict[str, Path], run_dir: Path, index: int, log: Log
) -> web.Application:
    """The application, which connects to its schedulers when it starts up. Raises ModelFilesError."""
    served = {name: load_model(name, directory) for name, directory in models.items()}
    app = web.Application(middlewares=[request_middleware(log)], client_max_size=config.max_body_bytes)
    for dialect in DIALECTS:
        app.router.add_post(dialect.route, task_handler(dialect), expect_handler=expect)
    app.router.add_get("/v1/models", health.models, expect_handler=expect)
    app.router.add_get("/health/live", health.live, expect_handler=expect)
    app.router.add_get("/health/ready", health.ready, expect_handler=expect)
    app.router.add_get("/metrics", health.metrics, expect_handler=expect)
    app.router.add_route("*", "/{path:.*}", no_route, expect_handler=expect)

    async def schedulers(app: web.Application) -> AsyncIterator[None]:
        """Connections, the watcher of replicas.json and the tokenizer's threads, for as long as the app runs."""
        metrics = Metrics()
        client = SchedulerClient(
            list(served), Sender(new_incarnation(), index, config.spin_us), config.replica_wait_ms, metrics
        )
        pool = ThreadPoolExecutor(config.num_tokenizer_threads, thread_name_prefix="tokenizer")
        watcher = ReplicaWatcher(replicas_file(run_dir), client.update, log)
        watcher.poll()
        watching = asyncio.create_task(watcher.run())
        app[GATEWAY] = Gateway(config, served, client, metrics, pool, watching)
        yield
        watching.cancel()
        await asyncio.wait({watching})
        client.close()
        pool.shutdown(wait=False, cancel_futures=True)

    app.cleanup_ctx.append(schedulers)
    return app


def bind(host: str, port: int) -> socket.socket:
    """A listening address that several gateways share; the kernel spreads connections over them."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        return listener
    except BaseException:
        listener.close()
        raise


async def no_route(request: web.Request) -> web.Response:
    """404 for an unknown path, 405 for a known one with the wrong method."""
    known = {dialect.route: "POST" for dialect in DIALECTS}
    known |= dict.fromkeys(("/v1/models", "/health/live", "/health/ready", "/metrics"), "GET")
    allowed = known.get(request.path)
    if allowed is None:
        raise UnknownRoute(f"no such path: {request.path[:200]}")
    response = error_response(MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method[:20]}"))
    response.headers["Allow"] = allowed
    return response


async def expect(request: web.Request) -> web.StreamResponse | None:
    """Answers `Expect: 100-continue`; refuses any other expectation."""
    if request.version == (1, 1):
        if request.headers.get("Expect", "").lower() != "100-continue":
            return error_response(BadExpectation("Expect may only be 100-continue", param="Expect"))
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    return None
