"""An encoder's steps on CPU: divided among threads by sequences. See rose.model_runner for the interface."""

from functools import partial

import torch

from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts
from rose.attention.sdpa import SdpaBackend
from rose.batch import step_rows
from rose.cpu_stream import CpuStream
from rose.encoder import Encoder, EncoderParts
from rose.layers.packed_linear import pack_linears
from rose.runner import LazyTensor


class CpuEncoder:
    idle_work = False

    def __init__(self, parts: EncoderParts, facts: ModelFacts, num_threads: int) -> None:
        pack_linears(parts.model)
        self._encoder = Encoder(parts, SdpaBackend(), torch.device("cpu"))
        self._facts = facts
        self._num_threads = num_threads
        self._stream = CpuStream(num_threads)

    def encode(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        parts = step_rows(plan, arrays, self._facts, self._num_threads)
        return self._stream.launch([partial(self._encoder.run, part) for part in parts])

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
