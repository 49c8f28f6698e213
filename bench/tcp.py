"""A running stack with gateways and schedulers joined by tcp: what replicas.json says is changed and changed back."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from services.config import read_run_config
from services.replicas import ReplicaTable, read_replicas, replica_index, write_replicas

SETTLE_S = 1.5  # gateways look at the file four times a second, and greet


@contextmanager
def over_tcp(run_dir: Path) -> Iterator[bool]:
    """True when every scheduler of the stack listens on tcp and the gateways now use that."""
    config = read_run_config(run_dir / "config.json").config
    before = read_replicas(run_dir)
    changed = msgspec.json.decode(msgspec.json.encode(before), type=ReplicaTable)
    for model in config.models:
        for replica in changed.models[model.name].replicas:
            if model.scheduler.listen is None or replica_index(replica.id) > 0:
                yield False
                return
            replica.endpoint = model.scheduler.listen
    write_replicas(run_dir, changed)
    time.sleep(SETTLE_S)
    try:
        yield True
    finally:
        before.version = changed.version
        write_replicas(run_dir, before)
        time.sleep(SETTLE_S)
