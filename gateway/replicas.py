"""Watches replicas.json: which replicas there are. The service writes it atomically."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

POLL_S = 0.25


class Replica(Struct, frozen=True):
    id: str
    endpoint: str
    state: Literal["active", "draining"] = "active"


class ModelReplicas(Struct, frozen=True):
    replicas: list[Replica] = []


class ReplicasFile(Struct, frozen=True):
    version: int
    models: dict[str, ModelReplicas]


_decoder = msgspec.json.Decoder(ReplicasFile)


class ReplicaWatcher:
    """Tells `on_change` the replicas by model, at every change of the file.

    A file that is missing or cannot be read changes nothing: the last list goes on.
    """

    def __init__(
        self, path: Path, on_change: Callable[[Mapping[str, list[Replica]]], None], log: Callable[..., None]
    ) -> None:
        self._path = path
        self._on_change = on_change
        self._log = log
        self._seen: tuple[int, int, int] | None = None

    def poll(self) -> None:
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen == self._seen:
                return
            self._seen = seen
            content = _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            self._log("replicas_file_unreadable", level="warning", path=str(self._path), error=str(error))
            return
        self._log("replicas_changed", version=content.version)
        self._on_change({name: model.replicas for name, model in content.models.items()})

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            self.poll()
            await asyncio.sleep(POLL_S)
