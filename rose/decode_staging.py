"""Page-locked memory between a GPU and what a step's slot holds, and what the host does when a step has landed."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.step_ring import Arrays, field_offsets, generate_layout
from ipc.types import ModelFacts
from rose.runner import LazyTensor


class Landing:
    """A step's result with something left to do on the host, once, when it is there."""

    def __init__(self, lazy: LazyTensor, work: Callable[[], None]) -> None:
        self._lazy = lazy
        self._work: Callable[[], None] | None = work

    def ready(self) -> bool:
        if not self._lazy.ready():
            return False
        work, self._work = self._work, None
        if work is not None:
            work()
        return True

    def fileno(self) -> int:
        return self._lazy.fileno()


class StagedMasks:
    """Grammar masks on their way to the device, for so many steps in flight, turn by turn. Memory comes with use."""

    def __init__(self, facts: ModelFacts, num_steps: int, device: torch.device) -> None:
        self._size = (facts.max_num_seqs * (facts.max_draft_tokens + 1), -(-facts.vocab_size // 32))
        self._num_steps, self._device, self._turn = num_steps, device, 0
        self._host: list[Tensor] = []
        self._masks: Tensor | None = None

    def put(self, masks: NDArray[np.int32] | None, num_rows: int) -> Tensor:
        """masks int32 [n, ceil(V / 32)] -> the same on the device for num_rows >= n; more rows may have any token."""
        if self._masks is None:
            pinned = self._device.type == "cuda"
            self._masks = torch.zeros(self._size, dtype=torch.int32, device=self._device)
            self._host = [torch.zeros(self._size, dtype=torch.int32, pin_memory=pinned) for _ in range(self._num_steps)]
        staged = self._host[self._turn % self._num_steps][:num_rows]
        self._turn += 1
        count = 0 if masks is None else len(masks)
        if masks is not None:
            staged[:count].numpy()[:] = masks
        staged[count:] = -1
        return self._masks[:num_rows].copy_(staged, non_blocking=True)


class StagedOutputs:
    """Page-locked memory that steps without a graph write their outputs to, for so many `num_steps` in flight, turn by
    turn: a slot's own need not be page-locked, and a copy to memory that is not would wait for the device."""

    def __init__(self, facts: ModelFacts, num_steps: int, device: torch.device) -> None:
        self._layout = generate_layout(facts)
        offsets, num_bytes = field_offsets(self._layout.outputs)
        self._offsets = offsets
        self._regions = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda").numpy()
            for _ in range(num_steps)
        ]
        self._turn = 0

    @property
    def region_bytes(self) -> tuple[int, int]:
        """Sizes of a slot's inputs and outputs."""
        return field_offsets(self._layout.inputs)[1], len(self._regions[0])

    def take(self, arrays: Arrays) -> tuple[Arrays, Callable[[], None]]:
        """A slot's arrays with outputs staged; to be called when these are written: it puts them into the slot."""
        region = self._regions[self._turn % len(self._regions)]
        self._turn += 1
        views = {
            field.name: region[offset : offset + field.num_bytes].view(np.dtype(field.dtype)).reshape(field.shape)
            for field, offset in zip(self._layout.outputs, self._offsets, strict=True)
        }
        return {**arrays, **views}, partial(np.copyto, arrays["outputs"], region)
