"""Ivy, the gateway: which routes there are, and how one process of it lives. Read this first, then handlers.py."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from gateway import health
from gateway.client import SchedulerClient
from gateway.config import GatewayConfig
from gateway.dialects.registry import DIALECTS
from gateway.front import ANYTHING, Front, Route
from gateway.handlers import task_handler
from gateway.link import Sender
from gateway.metrics import Metrics
from gateway.models import ServedModel, load_model
from gateway.replicas import ReplicaWatcher
from gateway.server import HttpServer
from gateway.state import Gateway
from ipc.addresses import replicas_file
from ipc.types import new_incarnation

Log = Callable[..., None]
ROUTES = {dialect.route: Route("POST", task_handler(dialect)) for dialect in DIALECTS} | {
    "/v1/models": Route("GET", health.models),
    f"{health.MODELS}{ANYTHING}": Route("GET", health.model),
    "/health/live": Route("GET", health.live),
    "/health/ready": Route("GET", health.ready),
    "/metrics": Route("GET", health.metrics),
}
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
        own = config.generation_defaults
        served = {name: load_model(name, path, generation_defaults=own) for name, path in models.items()}
        async with running_gateway(config, served, run_dir, index, log) as gateway:
            server = HttpServer(Front(gateway, ROUTES, log), config)
            try:
                await gateway.client.wait_known(FIRST_STATUS_S)
                await server.listen(listener)
                log("listening", host=config.host, port=listener.getsockname()[1])
                await _stop_or_end(stop, gateway.watching)
                log("draining", in_flight=gateway.admission.in_use)
                gateway.draining = True
                await server.drain()
            finally:
                drain_s = config.drain_timeout_ms / 1000
                timer = asyncio.get_running_loop().call_later(
                    max(drain_s - LAST_WORDS_S, drain_s / 2), gateway.client.give_up
                )
                await server.close()
                timer.cancel()
        log("stopped")
        if not gateway.watching.cancelled():
            gateway.watching.result()  # its error ends the process, which is started anew


async def _stop_or_end(stop: asyncio.Event, watching: "asyncio.Task[None]") -> None:
    """Until a stop is asked for, or the watcher has failed."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig, models: dict[str, ServedModel], run_dir: Path, index: int, log: Log
) -> AsyncIterator[Gateway]:
    """Connections to schedulers, the watcher of replicas.json and the tokenizer's threads."""
    metrics = Metrics()
    sender = Sender(new_incarnation(), index, config.spin_us)
    client = SchedulerClient(list(models), sender, config.replica_wait_ms, metrics)
    pool = ThreadPoolExecutor(config.num_tokenizer_threads, thread_name_prefix="tokenizer")
    watcher = ReplicaWatcher(replicas_file(run_dir), client.update, log)
    watcher.poll()
    watching = asyncio.create_task(watcher.run())
    try:
        yield Gateway(config, models, client, metrics, pool, watching)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        client.close()
        pool.shutdown(wait=False, cancel_futures=True)


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
