"""What the rank's main loop asks of a runner. Free of torch, so that a rank can be faked in tests."""

from typing import Protocol

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts


class OutOfMemory(RuntimeError):
    """The step did not fit; nothing was computed and a smaller step may work."""


class LazyTensor(Protocol):
    """A step's result on its way to the slot's output arrays."""

    def ready(self) -> bool:
        """Whether the outputs are in the slot. Raises OutOfMemory, or anything else for a fatal fault."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when `ready` turns true, or -1 where only polling tells."""


class Runner(Protocol):
    """A model on a device. One thread calls it."""

    facts: ModelFacts  # from configuration alone until `load` has run

    @property
    def idle_work(self) -> bool:
        """Whether an idle step would be put to use; may change with every step."""

    def load(self, join: Join) -> ModelFacts:
        """Weights, memory, and one real forward pass of the largest admissible shape. Returns final facts."""

    def attach(self, ring: StepRing | None) -> None:
        """The ring of the coming epoch, to be page-locked where the device wants that; None before it is unmapped."""

    def step(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        """Launches one step and returns at once; at most `facts.num_steps_in_flight` at a time."""

    def drain(self) -> None:
        """Waits until no step is running."""

    def figures(self) -> dict[str, float]:
        """Counters (names end in `_total`) and gauges of the device, once loaded."""
