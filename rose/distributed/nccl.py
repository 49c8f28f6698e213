"""A group of ranks on GPUs, over NCCL, small sums over shared memory. Every collective is a launch on the current
stream and may be captured."""

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rose.distributed.group import LEADER
from rose.distributed.shared_sums import SharedSums, Ways, memory_to_share

TIMEOUT = timedelta(hours=1)  # schedulers kill a group that stands still long before


class NcclGroup:
    """Met at the file `path`. See rose.distributed.group.Group. A process has one: it is torch's default group.

    `ways`: up to which size sums are made in shared memory; None: all of them are NCCL's.
    """

    def __init__(self, path: str, rank: int, size: int, device: torch.device, ways: Ways | None) -> None:
        self.rank, self.size, self.leads = rank, size, rank == LEADER
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        dist.init_process_group(
            "nccl", init_method=f"file://{path}", rank=rank, world_size=size, timeout=TIMEOUT, device_id=device
        )
        self._connect(device)
        self.shared_sums = None if ways is None else self._share(device, ways)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = None if self.shared_sums is None else self.shared_sums.sum(x)
        if total is None:
            dist.all_reduce(x)
            return x
        return total

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return None if self.shared_sums is None else self.shared_sums.room(shape, dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * x.numel())
        dist.all_gather_into_tensor(parts, x.reshape(-1))
        return parts.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, LEADER)
        return x

    def _connect(self, device: torch.device) -> None:
        """One of each kind: NCCL makes connections at first use, which a capture must not meet."""
        x = torch.zeros(4, device=device)
        self.broadcast(x)
        self.all_gather(x)
        dist.all_reduce(x)
        torch.cuda.synchronize(device)

    def _share(self, device: torch.device, ways: Ways) -> SharedSums | None:
        """On all ranks or none: where one cannot map the others' memory, NCCL does all sums."""
        group = dist.group.WORLD
        assert group is not None
        memory = sums = None
        reason = ""
        try:
            memory = memory_to_share(group, device, ways)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        if _all(memory is not None, device) and memory is not None:  # else some would wait for one that does not come
            try:
                sums = SharedSums(group, memory, ways)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
            if _all(sums is not None, device):
                return sums
        warnings.warn(
            f"rank {self.rank}: small sums go over NCCL, some 3 us slower each: "
            f"{reason or 'another rank cannot map memory of this one'}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _all(able: bool, device: torch.device) -> bool:
    """Whether every rank is. All of them ask."""
    least = torch.tensor([able], dtype=torch.int32, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(least.item())
