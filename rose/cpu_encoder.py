"""An encoder's steps on CPU: divided among threads by sequences. See rose.model_runner for the interface.

In a group of ranks they are not divided: layers meet the other ranks' in one order.
"""

from functools import partial

import torch

from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts
from rose.attention.sdpa import SdpaBackend
from rose.batch import step_rows
from rose.cpu_stream import CpuStream, Work
from rose.distributed.agreement import Agreement
from rose.distributed.group import ALONE, Group
from rose.encoder import Encoder, EncoderParts
from rose.layers.packed_linear import pack_linears
from rose.runner import LazyTensor


class CpuEncoder:
    idle_work = False

    def __init__(self, parts: EncoderParts, facts: ModelFacts, num_threads: int, group: Group = ALONE) -> None:
        pack_linears(parts.model)
        self._encoder = Encoder(parts, SdpaBackend(), torch.device("cpu"), group)
        self._group, self._agreement = group, Agreement(group)
        self._facts = facts
        self._num_threads = num_threads
        self._stream = CpuStream(num_threads, in_order=group.size > 1)

    def encode(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        if self._group.size > 1:
            return self._stream.launch([partial(self._together, plan, arrays)])
        parts = step_rows(plan, arrays, self._facts, self._num_threads)
        works: list[Work] = [partial(self._encoder.run, part) for part in parts]
        return self._stream.launch(works)

    def _together(self, plan: StepPlan, arrays: Arrays) -> None:
        """A whole step, each rank with its part of every layer."""
        self._agreement.check(plan, arrays)
        (rows,) = step_rows(plan, arrays, self._facts, 1)
        self._encoder.run(rows)

    def idle(self) -> LazyTensor:
        return self._stream.launch([])

    def attach(self, ring: StepRing | None) -> None:
        """A CPU reads any memory."""

    def drain(self) -> None:
        self._stream.drain()

    def close(self) -> None:
        self._stream.close()

    def figures(self) -> dict[str, float]:
        return {}
