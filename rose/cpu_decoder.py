"""A decoder's steps on CPU: one after another on a thread of their own. See rose.decoder_runner for the interface."""

from functools import partial

from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing
from rose.cpu_stream import CpuStream
from rose.decoder import Decoder
from rose.runner import LazyTensor


class CpuDecoder:
    """Each step has all `num_threads` cores: the next one needs its tokens."""

    idle_work = False

    def __init__(self, decoder: Decoder, num_threads: int) -> None:
        self._decoder = decoder
        self._stream = CpuStream(num_threads, in_order=True)

    def generate(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        return self._stream.launch([partial(self._decoder.run, plan, arrays)])

    def idle(self) -> LazyTensor:
        return self._stream.launch([])

    def attach(self, ring: StepRing | None) -> None:
        """A CPU reads any memory; whoever was in a slot belonged to another scheduler."""
        self._decoder.clear()

    def drain(self) -> None:
        self._stream.drain()

    def close(self) -> None:
        self._stream.close()

    def figures(self) -> dict[str, float]:
        return {}
