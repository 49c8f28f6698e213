"""A real scheduler on the test's own loop, with fake rank processes and a hand-driven gateway around it."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import numpy as np
import zmq
from msgspec import Struct
from numpy.typing import NDArray

from ipc import addresses
from ipc.codec import TO_GATEWAY, encode
from ipc.control import Heartbeat, Hello, Quarantine, Status
from ipc.sockets import EventSocket, PeerFull, dealer
from ipc.submit import Abort, Rejected, Result, Submit, TokenChunk, TokenDelta
from ipc.types import OutputSpec, SamplingParams, new_incarnation
from scheduler.config import SchedulerConfig
from scheduler.loop import Scheduler
from tests.fakes.rank import expected_vector

REPLICA = "fake/0"
Outcome = tuple[Result | Rejected, bytes]


class HandGateway:
    """Speaks the gateway's side; keeps everything it is told."""

    def __init__(self, run_dir: Path, incarnation: int | None = None) -> None:
        self.incarnation = incarnation or new_incarnation()
        self.scheduler = 0
        self.statuses: list[Status] = []
        self.quarantines: list[Quarantine] = []
        self.outcomes: dict[int, list[Outcome]] = {}
        self.deltas: dict[int, list[TokenDelta]] = {}
        self._news = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = dealer(self._context, addresses.gateway_endpoint(run_dir, REPLICA), f"g{self.incarnation}".encode())
        self._socket = EventSocket(socket, self._on_message, asyncio.get_running_loop())
        self._beating = asyncio.create_task(self._beat())

    async def send(self, message: Struct, frame: bytes | None = None) -> None:
        """Waits for the connection where there is none yet."""
        while True:
            try:
                return self._socket.send([encode(message)] + ([] if frame is None else [frame]))
            except PeerFull:
                await asyncio.sleep(0.01)

    async def ready(self) -> Status:
        return await self.until(lambda: self.statuses and self.statuses[-1].state == "ready" and self.statuses[-1])

    async def until(self, condition, seconds: float = 20.0):  # type: ignore[no-untyped-def]
        """Waits for `condition()` to be true, which messages and time bring about; returns its value."""
        async with asyncio.timeout(seconds):
            while not (value := condition()):
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.01)
            return value

    async def submit(self, chunk_id: int, rows: list[list[int]], **changes: object) -> None:
        frame = np.concatenate([np.asarray(row, np.int32) for row in rows]).tobytes()
        fields = {
            "gateway": self.incarnation,
            "scheduler": self.scheduler,
            "chunk_id": chunk_id,
            "lengths": [len(row) for row in rows],
            "timeout_ms": 20_000,
        }
        await self.send(Submit(**(fields | changes)), frame)  # type: ignore[arg-type]

    async def abort(self, chunk_id: int) -> None:
        await self.send(Abort(self.incarnation, self.scheduler, chunk_id))

    async def outcome(self, chunk_id: int, seconds: float = 20.0) -> Outcome:
        found: list[Outcome] = await self.until(lambda: self.outcomes.get(chunk_id), seconds)
        assert len(found) == 1
        return found[0]

    async def embed(self, chunk_id: int, rows: list[list[int]], **changes: object) -> NDArray[np.float32]:
        """The vectors; asserts that there are some."""
        await self.submit(chunk_id, rows, **changes)
        return vectors(await self.outcome(chunk_id))

    async def generate(
        self, chunk_id: int, prompt: list[int], params: SamplingParams, **changes: object
    ) -> tuple[list[int], str]:
        """The tokens and the end: a finish reason, or the code of a rejection."""
        await self.submit(chunk_id, [prompt], sampling=params, **changes)
        return await self.generated(chunk_id)

    async def generated(self, chunk_id: int) -> tuple[list[int], str]:
        await self.until(lambda: self.end_of(chunk_id))
        return [token for delta in self.deltas.get(chunk_id, []) for token in delta.tokens], self.end_of(chunk_id)

    def end_of(self, chunk_id: int) -> str:
        """Of a generation; "" while it goes on. Asserts that there is one end."""
        ends = [delta.finish_reason for delta in self.deltas.get(chunk_id, []) if delta.finish_reason]
        ends += [message.code for message, _ in self.outcomes.get(chunk_id, []) if isinstance(message, Rejected)]
        assert len(ends) <= 1
        return ends[0] if ends else ""

    async def close(self) -> None:
        self._beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._beating
        self._socket.close()
        self._context.destroy(linger=0)

    async def _beat(self) -> None:
        await self.send(Hello(self.incarnation, "gateway", 0, 1))
        while True:
            await asyncio.sleep(0.2)
            with contextlib.suppress(PeerFull):
                self._socket.send([encode(Heartbeat(self.incarnation))])

    def _on_message(self, frames: list[bytes]) -> None:
        message = TO_GATEWAY.decode(frames[0])
        match message:
            case Status():
                self.scheduler = message.incarnation
                self.statuses.append(message)
            case TokenChunk():
                for delta in message.deltas:
                    self.deltas.setdefault(delta.chunk_id, []).append(delta)
            case Quarantine():
                self.quarantines.append(message)
            case Result() | Rejected():
                self.outcomes.setdefault(message.chunk_id, []).append((message, b"".join(frames[1:])))
        self._news.set()


class Stack:
    """Starts and ends what a test asks for."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.events: list[dict[str, object]] = []
        self.schedulers: list[Scheduler] = []
        self.gateways: list[HandGateway] = []
        self.ended_ranks: list[int] = []  # which the scheduler has wanted ended, though it does not know their pid
        self.processes: list[subprocess.Popen[bytes]] = []
        self.supervisors: list[asyncio.Task[None]] = []

    def log(self, event: str, **fields: object) -> None:
        self.events.append({"event": event, **fields})

    def logged(self, event: str) -> list[dict[str, object]]:
        return [each for each in self.events if each["event"] == event]

    def scheduler(self, tensor_parallel_size: int = 1, **config: object) -> Scheduler:
        settings = SchedulerConfig(**config)  # type: ignore[arg-type]
        made = Scheduler(
            settings, REPLICA, "fake", tensor_parallel_size, self.run_dir, self.log, self.ended_ranks.append
        )
        self.schedulers.append(made)
        return made

    def stop_scheduler(self, scheduler: Scheduler) -> None:
        """As if it had died: no draining."""
        scheduler.close()
        self.schedulers.remove(scheduler)

    def gateway(self, incarnation: int | None = None) -> HandGateway:
        self.gateways.append(HandGateway(self.run_dir, incarnation))
        return self.gateways[-1]

    def rank(self, rank: int = 0, facts: dict[str, object] | None = None, **options: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.fakes.rank", "--run-dir", str(self.run_dir), "--replica", REPLICA]
        command += ["--rank", str(rank), "--facts", json.dumps(facts or {})]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        self.processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        return self.processes[-1]

    def supervised_rank(self, rank: int = 0, **options: object) -> None:
        """A rank that is started again whenever it ends, as supervisord does."""
        self.supervisors.append(asyncio.create_task(self._supervise(rank, options)))

    async def _supervise(self, rank: int, options: dict[str, object]) -> None:
        while True:
            process = self.rank(rank, **options)  # type: ignore[arg-type]
            await self.ended(process, seconds=3600)

    async def ended(self, process: subprocess.Popen[bytes], seconds: float = 10.0) -> int:
        async with asyncio.timeout(seconds):
            while process.poll() is None:
                await asyncio.sleep(0.01)
        return int(process.returncode)

    async def close(self) -> None:
        for supervisor in self.supervisors:
            supervisor.cancel()
        await asyncio.gather(*self.supervisors, return_exceptions=True)
        for gateway in self.gateways:
            await gateway.close()
        for scheduler in self.schedulers:
            scheduler.close()
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


@contextlib.asynccontextmanager
async def stack() -> AsyncIterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="bq") as run_dir:
        made = Stack(Path(run_dir))
        try:
            yield made
        finally:
            await made.close()


def vectors(outcome: Outcome) -> NDArray[np.float32]:
    message, payload = outcome
    assert isinstance(message, Result), message
    return np.frombuffer(payload, np.float32).reshape(message.num_rows, -1)


def expected(rows: Iterable[list[int]], dimension: int = 384) -> NDArray[np.float32]:
    return np.stack([expected_vector(row, dimension) for row in rows])


__all__ = ["REPLICA", "HandGateway", "OutputSpec", "Stack", "expected", "stack", "vectors"]
