"""The runner of every model: what its loader has put on a device, and what all of them do alike with it.

See rose.runner for the contract. In one process (bulk jobs, tests) drive it with ipc.step_ring.local_slots and plans of
your own. Knows neither encoders nor decoders.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts
from rose.lazy_tensor import as_step_error
from rose.runner import LazyTensor


class Device(Protocol):
    """A loaded model on one kind of device: rose.{cpu,cuda}_{encoder,decoder}."""

    @property
    def idle_work(self) -> bool: ...

    def idle(self) -> LazyTensor:
        """A bit of what the device does when there is nothing to do."""

    def attach(self, ring: StepRing | None) -> None:
        """Another scheduler begins: whoever was in a slot is gone."""

    def drain(self) -> None: ...

    def close(self) -> None: ...

    def figures(self) -> dict[str, float]: ...


class Loaded(NamedTuple):
    """A model that is ready, and what starts a step of it."""

    device: Device
    launch: Callable[[StepPlan, Arrays], LazyTensor]


class Loader(Protocol):
    """One model's files and settings: rose.encoder_loader, rose.decoder_loader."""

    facts: ModelFacts  # from configuration alone until `load` has run

    @property
    def kind(self) -> Literal["encode", "generate"]:
        """Of the steps that the model takes."""

    def load(self, join: Join | None) -> Loaded:
        """The group, if there are other ranks, weights and memory. Raises ModelError, torch.OutOfMemoryError."""

    def warm_up(self, runner: "ModelRunner") -> None:
        """The largest admissible step, once. Raises OutOfMemory."""


class ModelRunner:
    """Implements rose.runner.Runner."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.facts = loader.facts
        self._loaded: Loaded | None = None

    def load(self, join: Join | None = None) -> ModelFacts:
        """Raises ModelError, OutOfMemory."""
        try:
            self.use(self.loader.load(join))
        except torch.OutOfMemoryError as error:
            raise as_step_error(error) from error
        self.facts = self.loader.facts
        self.loader.warm_up(self)
        return self.facts

    def use(self, loaded: Loaded) -> None:
        """Steps run on this from now on."""
        self._loaded = loaded

    def attach(self, ring: StepRing | None) -> None:
        self.device.attach(ring)

    def step(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        device, launch = self._required
        if plan.kind == "idle":
            return device.idle()
        kind = self.loader.kind
        assert plan.kind == kind, f"sent a step to {plan.kind}, this model's {kind}: check which planner serves it"
        return launch(plan, arrays)

    def drain(self) -> None:
        if self._loaded is not None:
            self._loaded.device.drain()

    def close(self) -> None:
        """Ends the threads. A process that ends anyway need not call it."""
        if self._loaded is not None:
            self._loaded.device.close()
            self._loaded = None

    def figures(self) -> dict[str, float]:
        return self.device.figures()

    @property
    def idle_work(self) -> bool:
        return self.device.idle_work

    @property
    def device(self) -> Device:
        return self._required.device

    @property
    def _required(self) -> Loaded:
        assert self._loaded is not None, "nothing is loaded: call load() first"
        return self._loaded
