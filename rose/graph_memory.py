"""How much of a device's memory graphs may take: what the largest eager step needs has to stay.

What captures have taken is lost to eager steps for good: their pool never gives memory back, and a capture that fails
leaves in it what it had taken by then.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from rose.graph_policy import GraphKey

SLACK = 1.125  # of what a step took: after other steps the allocator may have to divide memory in another way


class GraphMemory(Protocol):
    def has_room(self) -> bool:
        """Whether the largest step would still fit with nothing more taken; if not, nothing is to be prepared."""

    def capturing(self, key: GraphKey) -> AbstractContextManager[None]:
        """Around a capture, in which torch.OutOfMemoryError is raised before the largest step has too little left."""

    def evicted(self, key: GraphKey) -> None:
        """The graph of `key` is gone, and what it kept."""


class UnboundedMemory:
    """Of hosts, and where nobody has measured a step."""

    def has_room(self) -> bool:
        return True

    def capturing(self, key: GraphKey) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def evicted(self, key: GraphKey) -> None:
        pass


class CudaGraphMemory:
    """`step_bytes`: what the largest step takes of the device beyond all that stays. One for a process and device."""

    def __init__(self, step_bytes: int) -> None:
        self._step_bytes = int(step_bytes * SLACK)
        self._taken_bytes = 0
        self._kept_bytes: dict[GraphKey, int] = {}  # of them; in use from one replay to the next

    def has_room(self) -> bool:
        return self._spare_bytes() >= 0

    @contextlib.contextmanager
    def capturing(self, key: GraphKey) -> Iterator[None]:
        fraction, reserved = torch.cuda.get_per_process_memory_fraction(), torch.cuda.memory_reserved()
        allocated = torch.cuda.memory_allocated()
        total = torch.cuda.mem_get_info()[1]
        allowed = reserved + max(0, self._spare_bytes())
        torch.cuda.set_per_process_memory_fraction(min(fraction, allowed / total))
        try:
            yield
            self._kept_bytes[key] = torch.cuda.memory_allocated() - allocated
        finally:
            torch.cuda.set_per_process_memory_fraction(fraction)
            self._taken_bytes += torch.cuda.memory_reserved() - reserved

    def evicted(self, key: GraphKey) -> None:
        self._kept_bytes.pop(key, None)

    def _spare_bytes(self) -> int:
        """That graphs may take: the process's limit, or what others leave of the device, less what is in use, what
        graphs have and what the largest step needs."""
        free, total = torch.cuda.mem_get_info()
        limit = min(int(torch.cuda.get_per_process_memory_fraction() * total), torch.cuda.memory_reserved() + free)
        in_use = torch.cuda.memory_allocated() - sum(self._kept_bytes.values())  # these are among the taken
        return limit - in_use - self._taken_bytes - self._step_bytes
