"""The ranks of one replica as each of them sees the others: sums, gathered parts, what the leader says.

Collectives must come in the same order on every rank, which follows from the plans alone. Knows no models and no steps.
"""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ipc.control import Join

LEADER = 0


class Group(Protocol):
    """`rank` of `size`; rank 0 `leads`: it samples, decides and answers."""

    rank: int
    size: int
    leads: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, the same bits everywhere; may overwrite x (contiguous)."""
        ...

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Where an x of the next `all_reduce` is best made, until then; None: anywhere."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """x [...] of every rank, alike in shape and dtype, as [size, ...]."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """The leader's x, written over everybody else's (contiguous)."""
        ...


class Alone:
    """A group of one: every call gives back what it was given."""

    rank, size, leads = LEADER, 1, True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def broadcast(self, x: Tensor) -> Tensor:
        return x


ALONE = Alone()


def form_group(join: "Join | None", device: torch.device, *, shared_sums: bool = True) -> Group:
    """The group that a Join names. Waits for the other ranks; nobody joins twice in one life. `shared_sums`: on GPUs
    small sums may be made in each other's memory.

    Raises RuntimeError where they cannot be reached. A rank that never comes is the scheduler's to notice: it ends the
    epoch by its load deadline.
    """
    if join is None or len(join.members) == 1:
        return ALONE
    path, rank, size = join.rendezvous.removeprefix("file://"), join.rank, len(join.members)
    if device.type == "cpu":
        from rose.distributed.gloo import GlooGroup

        return GlooGroup(path, rank, size)
    from rose.distributed.nccl import NcclGroup
    from rose.distributed.shared_sums import MEASURED

    return NcclGroup(path, rank, size, device, MEASURED.get(size) if shared_sums else None)


def smallest(group: Group, number: int, device: torch.device) -> int:
    """The smallest of the ranks' numbers. Waits for them."""
    if group.size == 1:
        return number
    return int(group.all_gather(torch.tensor([number], dtype=torch.int64, device=device)).min())


def leaders(group: Group, number: int, device: torch.device) -> int:
    """The leader's number, whatever the others' is. Waits for it."""
    if group.size == 1:
        return number
    return int(group.broadcast(torch.tensor([number], dtype=torch.int64, device=device)))
