"""A group of ranks on GPUs, over NCCL. Every collective is a launch on the current stream and may be captured."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rose.distributed.group import LEADER

TIMEOUT = timedelta(hours=1)  # schedulers kill a group that stands still long before


class NcclGroup:
    """Met at the file `path`. See rose.distributed.group.Group. A process has one: it is torch's default group."""

    def __init__(self, path: str, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.leads = rank, size, rank == LEADER
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        dist.init_process_group(
            "nccl", init_method=f"file://{path}", rank=rank, world_size=size, timeout=TIMEOUT, device_id=device
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * x.numel())
        dist.all_gather_into_tensor(parts, x.reshape(-1))
        return parts.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, LEADER)
        return x
