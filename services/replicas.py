"""replicas.json: which replicas exist and which are being drained. Written whole; gateways watch it."""

import os
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from ipc.addresses import gateway_endpoint, replica_id, replicas_file
from services.files import write_private

State = Literal["active", "draining"]


class ReplicasError(RuntimeError):
    """The file cannot be read; the text says what to do."""


class Replica(Struct):
    id: str  # replica_id
    endpoint: str  # of its scheduler, for gateways
    state: State = "active"


class ModelReplicas(Struct):
    replicas: list[Replica] = []


class ReplicaTable(Struct):
    """The file's content. `version` grows with every write."""

    version: int = 0
    models: dict[str, ModelReplicas] = {}

    def ids(self, model: str) -> list[str]:
        """Replica ids of `model` in order of their index. Raises KeyError."""
        return sorted((replica.id for replica in self.models[model].replicas), key=replica_index)

    def add(self, run_dir: Path, model: str, replica: str) -> None:
        entry = Replica(replica, gateway_endpoint(run_dir, replica))
        self.models.setdefault(model, ModelReplicas()).replicas.append(entry)

    def remove(self, model: str, replica: str) -> None:
        replicas = self.models[model].replicas
        replicas[:] = [entry for entry in replicas if entry.id != replica]

    def mark(self, model: str, replica: str, state: State) -> None:
        for entry in self.models[model].replicas:
            if entry.id == replica:
                entry.state = state

    def num_active(self, model: str, apart_from: str = "") -> int:
        """Replicas that take work, `apart_from` not counted."""
        return sum(entry.state == "active" and entry.id != apart_from for entry in self.models[model].replicas)

    def draining(self, model: str) -> list[str]:
        return [entry.id for entry in self.models[model].replicas if entry.state == "draining"]

    def free_id(self, model: str) -> str:
        """The id of a new replica: the lowest index not in use."""
        taken = {replica_index(replica) for replica in self.ids(model)}
        return replica_id(model, next(index for index in range(len(taken) + 1) if index not in taken))


def replica_index(replica: str) -> int:
    return int(replica.rpartition("/")[2])


def read_replicas(run_dir: Path) -> ReplicaTable:
    """Raises ReplicasError."""
    path = replicas_file(run_dir)
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplicaTable)
    except (OSError, msgspec.MsgspecError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ReplicasError(
            f"{path} cannot be read ({reason}); `bouquet down` and `bouquet up` write it anew"
        ) from None


def write_replicas(run_dir: Path, table: ReplicaTable) -> None:
    """Replaces the file in one step, so that a reader sees the old or the new table and nothing between."""
    table.version += 1
    path = replicas_file(run_dir)
    temporary = path.with_suffix(".tmp")
    write_private(temporary, msgspec.json.format(msgspec.json.encode(table)))
    os.replace(temporary, path)
