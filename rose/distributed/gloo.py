"""A group of ranks on CPU, over gloo: connections on the loopback device, since all ranks of a replica share a host."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rose.distributed.group import LEADER

TIMEOUT = timedelta(hours=1)  # schedulers kill a group that stands still long before
_Gloo: Any = dist.ProcessGroupGloo  # its methods come from C++, without types


class GlooGroup:
    """Met at the file `path`. See rose.distributed.group.Group."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.rank, self.size, self.leads = rank, size, rank == LEADER
        options = _Gloo._Options()
        options._timeout = TIMEOUT
        options._devices = [_Gloo.create_device(hostname="127.0.0.1")]
        self._store = dist.FileStore(path, size)  # type: ignore[attr-defined]
        self._group = _Gloo(self._store, rank, size, options)
        self._from_leader = dist.BroadcastOptions()
        self._from_leader.rootRank = LEADER

    def all_reduce(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * x.numel())
        self._group._allgather_base(parts, x.reshape(-1)).wait()
        return parts.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        self._group.broadcast([x], self._from_leader).wait()
        return x
