"""A StepStream on the host: work runs at once. With it CudaEncoder runs in Triton's interpreter, graphs and all."""

from collections.abc import Callable

import torch
from torch import Tensor

from rose.cuda_stream import Bytes


class Recorded:
    """Stands for a graph: a replay does what was captured again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class Landed:
    def ready(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1


class HostStream:
    def __init__(self) -> None:
        self.num_copies = [0, 0]
        self.num_captures = 0
        self.out_of_memory = False  # the next capture fails

    def attach(self, memory: Bytes | None) -> None:
        pass

    def copy_in(self, target: Tensor, source: Bytes) -> None:
        self.num_copies[0] += 1
        target[: len(source)].copy_(torch.from_numpy(source))

    def copy_out(self, source: Tensor, target: Bytes) -> None:
        self.num_copies[1] += 1
        torch.from_numpy(target).copy_(source[: len(target)])

    def finish(self) -> Landed:
        return Landed()

    def capture(self, work: Callable[[], None]) -> Recorded:
        if self.out_of_memory:
            self.out_of_memory = False
            raise torch.OutOfMemoryError("no room for a graph")
        self.num_captures += 1
        return Recorded(work)

    def drain(self) -> None:
        pass
