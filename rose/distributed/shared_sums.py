"""Small sums over memory that all ranks of a host have mapped: one kernel reads every rank's part where it lies.

Torch's symmetric memory, for sizes at which it is quicker than NCCL. One-shot: every rank adds up all of it; two-shot:
its part of it, and fetches the others'. Knows no NCCL and no models.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

_Memory: Any = _SymmetricMemory  # from C++, without types
_ALIGNMENT = 16  # bytes that a thread reads at a time
_DTYPES = (torch.float32, torch.bfloat16)  # that the kernels are made for

Way = Literal["one_shot", "two_shot"]
WAYS: tuple[Way, ...] = ("one_shot", "two_shot")


class Ways(NamedTuple):
    """Up to how many bytes either way is the quickest."""

    one_shot: int
    two_shot: int


# by the number of ranks; two H200 over NVLink: bench/results/2026-11-30_h200-2gpus_all-reduce.md, where two-shot is the
# quickest from 2 MiB on alone; for other numbers nothing has been measured
MEASURED = {2: Ways(one_shot=64 << 10, two_shot=64 << 10)}


def way(num_bytes: int, dtype: torch.dtype, ways: Ways) -> Way | None:
    """How so much is added up; None: not here."""
    if dtype not in _DTYPES or num_bytes % _ALIGNMENT or not 0 < num_bytes <= max(ways):
        return None
    return "one_shot" if num_bytes <= ways.one_shot else "two_shot"


def memory_to_share(group: dist.ProcessGroup, device: torch.device, ways: Ways) -> Tensor:
    """This rank's part, for SharedSums. Asks no other rank. Raises RuntimeError where there is none to be had."""
    memory: Tensor = _Memory.empty_strided_p2p((max(ways),), (1,), torch.uint8, device, group.group_name)
    return memory


class SharedSums:
    """Of one rank, on the device of its `memory` (memory_to_share). Launches on the current stream, which may be
    captured.

    Made by all ranks at the same time: each waits here for the others. Raises RuntimeError where they cannot map each
    other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, memory: Tensor, ways: Ways) -> None:
        self._group_name, self._ways, self._memory = group.group_name, ways, memory
        symmetric_memory.rendezvous(memory, group)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Where an x of the next `sum` may be made, so that it need not be copied; None: it is not for `sum`.

        The same memory every time: of use until that sum.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if way(num_bytes, dtype, self._ways) is None:
            return None
        return self._memory[:num_bytes].view(dtype).view(shape)

    def sum(self, x: Tensor) -> Tensor | None:
        """The sum of every rank's x (contiguous), in memory of its own; None: x is NCCL's."""
        chosen = way(x.nbytes, x.dtype, self._ways)
        return None if chosen is None else self.sum_by(chosen, x)

    def sum_by(self, chosen: Way, x: Tensor) -> Tensor:
        """The same by a way that is chosen already, of an x that there is room for."""
        room = self.room(tuple(x.shape), x.dtype)
        assert room is not None, f"{x.nbytes} bytes of {x.dtype} are not for shared memory"
        if x.data_ptr() != room.data_ptr():
            room.copy_(x)
        out = torch.empty_like(x)
        operators = torch.ops.symm_mem
        if chosen == "one_shot":
            operators.one_shot_all_reduce_out(room, "sum", self._group_name, out)
        else:
            operators.two_shot_all_reduce_out(room, "sum", self._group_name, out)  # overwrites the room, too
        return out
