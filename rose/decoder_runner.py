"""The runner of language models: facts from files, weights and cache at load, one launch per step.

See rose.runner for the contract. In one process (tests) drive it with ipc.step_ring.local_slots and plans of your own.
"""

import os
from pathlib import Path
from typing import Protocol, cast

import torch
from msgspec.structs import replace

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts
from rose.attention.paged_reference import ReferencePagedBackend
from rose.config import RankConfig
from rose.cpu_decoder import CpuDecoder
from rose.decoder import Decoder, DecoderParts, LanguageModel
from rose.decoder_facts import decoder_facts
from rose.decoder_warm_up import warm_up
from rose.device import resolve_device, resolve_dtype
from rose.kv_cache import KVShape, allocate, cpu_budget_bytes, num_blocks_for
from rose.layers.packed_linear import pack_linears
from rose.models.config import ModelError, read_config
from rose.models.load import load_model
from rose.models.task import GenerateTask, read_task
from rose.residents import Residents
from rose.runner import LazyTensor, OutOfMemory


class DeviceDecoder(Protocol):
    """A loaded language model on one kind of device: rose.cpu_decoder, rose.cuda_decoder."""

    def generate(self, plan: StepPlan, arrays: Arrays) -> LazyTensor: ...

    @property
    def idle_work(self) -> bool: ...

    def idle(self) -> LazyTensor:
        """A bit of what the device does when there is nothing to do."""

    def attach(self, ring: StepRing | None) -> None:
        """Empties every slot: another scheduler begins."""

    def drain(self) -> None: ...

    def close(self) -> None: ...

    def figures(self) -> dict[str, float]: ...


class DecoderRunner:
    """Generates. `facts` lack `num_blocks` until `load`, as everything else does."""

    def __init__(self, name: str, directory: Path, config: RankConfig, *, shapes: Path | None = None) -> None:
        self._directory = directory
        self._config = config
        self._shapes = shapes
        self._model_config = read_config(directory)
        task = read_task(directory, self._model_config, config.task)
        if not isinstance(task, GenerateTask):
            raise ModelError(f'{directory} is not served as a language model: set task = "generate" if it is one')
        self._task = task
        self._device = torch.device(resolve_device(config.device))
        self._dtype = resolve_dtype(config.dtype, self._device.type)
        self._num_threads = config.num_threads or len(os.sched_getaffinity(0))
        self.facts = decoder_facts(
            name=name,
            model=self._model_config,
            task=task,
            config=config,
            device=self._device.type,
            dtype=str(self._dtype).removeprefix("torch."),
        )
        self._decoder: DeviceDecoder | None = None

    def load(self, join: Join | None = None) -> ModelFacts:
        """Reads the weights, sizes the cache and runs a large step once. Raises ModelError, OutOfMemory."""
        try:
            self._decoder = self._load()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from error
        warm_up(self)
        self._decoder.attach(None)
        return self.facts

    def attach(self, ring: StepRing | None) -> None:
        self._loaded.attach(ring)

    def step(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        if plan.kind == "idle":
            return self._loaded.idle()
        assert plan.kind == "generate", f"a decoder was sent a {plan.kind} step: check which planner serves this model"
        return self._loaded.generate(plan, arrays)

    def drain(self) -> None:
        if self._decoder is not None:
            self._decoder.drain()

    def close(self) -> None:
        """Ends the threads. A process that ends anyway need not call it."""
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None

    def figures(self) -> dict[str, float]:
        return self._loaded.figures()

    @property
    def idle_work(self) -> bool:
        return self._loaded.idle_work

    @property
    def _loaded(self) -> DeviceDecoder:
        assert self._decoder is not None, "nothing is loaded: call load() first"
        return self._decoder

    def _load(self) -> DeviceDecoder:
        model = load_model(self._directory, self._model_config, self._task, self._device, self._dtype)
        pack_linears(model)
        shape = KVShape.of(self._model_config, self._dtype)
        num_blocks = num_blocks_for(
            shape,
            self._config.kv_cache_bytes or cpu_budget_bytes(),
            max_num_seqs=self.facts.max_num_seqs,
            max_model_len=self.facts.max_model_len,
        )
        self.facts = replace(self.facts, num_blocks=num_blocks)
        caches = allocate(shape, num_blocks, self._device)
        parts = DecoderParts(cast(LanguageModel, model), caches, ReferencePagedBackend())
        residents = Residents(self.facts, self._device, self._directory / "tokenizer.json")
        return CpuDecoder(Decoder(parts, residents, self.facts), self._num_threads)
