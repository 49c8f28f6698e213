"""One CUDA stream as the runner sees it: copies from and to slots, graphs, and the event behind a step.

Nothing here waits for the device but `drain`. Slots are page-locked where the driver allows it; where it does not,
and for slots that are plain memory of this process, copies go through page-locked buffers of our own.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rose.device import async_copies, pin, unpin
from rose.lazy_tensor import CudaLazyTensor
from rose.runner import LazyTensor

Bytes = NDArray[np.uint8]


class Graph(Protocol):
    def replay(self) -> None: ...


class StepStream(Protocol):
    """What an encoder on static buffers needs; implemented here for CUDA, and by tests for the host."""

    def copy_in(self, target: Tensor, source: Bytes) -> None:
        """To the beginning of `target`, uint8."""

    def copy_out(self, source: Tensor, target: Bytes) -> None:
        """From the beginning of `source`, uint8."""

    def attach(self, memory: Bytes | None) -> None: ...

    def finish(self) -> LazyTensor:
        """Ends the step: ready when everything enqueued before has been done and the outputs are in the slot."""

    def capture(self, work: Callable[[], object]) -> Graph:
        """The launches of `work`, which are not run."""

    def drain(self) -> None: ...


class CudaStream:
    """Becomes the calling thread's current stream. `num_steps`: in flight at most; `num_bytes`: of a slot's regions."""

    def __init__(self, num_steps: int, num_bytes: tuple[int, int]) -> None:
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # weights and buffers were filled there
        torch.cuda.set_stream(self._stream)
        self._pool = torch.cuda.graph_pool_handle()
        anchored = torch.zeros(1, device="cuda")
        self._anchor = self.capture(anchored.zero_)  # a pool whose last graph has gone takes no other
        self._num_bytes = num_bytes
        self._num_steps = num_steps
        self._copy = async_copies(self._stream.cuda_stream)
        self._events = [torch.cuda.Event() for _ in range(num_steps + 2)]  # more than are asked about at a time
        self._staging: list[tuple[Tensor, Tensor]] = []
        self._turn = 0
        self._landing: Callable[[], None] | None = None
        self._locked: Bytes | None = None

    def attach(self, memory: Bytes | None) -> None:
        """Page-locks the slots of the coming steps. No step may be in flight."""
        if self._locked is not None:
            unpin(self._locked)
            self._locked = None
        if memory is not None and pin(memory):
            self._locked = memory

    def copy_in(self, target: Tensor, source: Bytes) -> None:
        if self._locked is None:
            staged = self._buffers()[0][: len(source)]
            staged.copy_(torch.from_numpy(source))
            target[: len(source)].copy_(staged, non_blocking=True)
            return
        self._copy(target.data_ptr(), source.ctypes.data, len(source))

    def copy_out(self, source: Tensor, target: Bytes) -> None:
        if self._locked is not None:
            self._copy(target.ctypes.data, source.data_ptr(), len(target))
            return
        staged = self._buffers()[1][: len(target)]
        staged.copy_(source[: len(target)], non_blocking=True)
        self._landing = partial(np.copyto, target, staged.numpy())

    def finish(self) -> CudaLazyTensor:
        event = self._events[self._turn % len(self._events)]
        event.record(self._stream)
        landing, self._landing = self._landing, None
        self._turn += 1
        return CudaLazyTensor(event, landing)

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """All graphs share one memory pool: they run one after the other and keep nothing in it but what `work` leaves
        with somebody, who has to let go of it when the graph has gone.

        torch.cuda.graph would wait for the device and collect garbage first.
        """
        graph = torch.cuda.CUDAGraph()
        with _no_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def drain(self) -> None:
        self._stream.synchronize()

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """This step's page-locked buffers; its predecessor in them has been answered."""
        while len(self._staging) <= self._num_steps:
            inputs, outputs = (torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in self._num_bytes)
            self._staging.append((inputs, outputs))
        return self._staging[self._turn % len(self._staging)]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python frees no cycles meanwhile: among them may be old graphs, events and page-locked memory, and to free those
    during a capture spoils it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
