"""The runner of language models: facts from files, weights and cache at load, one launch per step.

See rose.runner for the contract. In one process (tests) drive it with ipc.step_ring.local_slots and plans of your own.
"""

import os
from pathlib import Path
from typing import Protocol

import torch
from msgspec.structs import replace

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts
from rose.config import RankConfig
from rose.cpu_decoder import load_cpu_decoder
from rose.decoder_facts import decoder_facts
from rose.decoder_warm_up import warm_up
from rose.device import resolve_device, resolve_dtype
from rose.distributed.group import ALONE, Group, form_group
from rose.distributed.shard import check_sizes, local_heads
from rose.models.config import ModelError, read_config
from rose.models.load import load_model
from rose.models.task import GenerateTask, read_task
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

    def __init__(
        self,
        name: str,
        directory: Path,
        config: RankConfig,
        *,
        shapes: Path | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
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
        check_sizes(self._model_config, tensor_parallel_size)
        facts = decoder_facts(
            name=name,
            model=self._model_config,
            task=task,
            config=config,
            device=self._device.type,
            dtype=str(self._dtype).removeprefix("torch."),
            num_threads=self._num_threads,
        )
        self.facts = replace(facts, tensor_parallel_size=tensor_parallel_size)
        self._group: Group = ALONE
        self._decoder: DeviceDecoder | None = None

    def load(self, join: Join | None = None) -> ModelFacts:
        """Forms the group, reads the weights, sizes the cache and runs a large step once.

        Raises ModelError, OutOfMemory.
        """
        self._group = form_group(join, self._device)
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
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(self._config.memory_fraction)
        model = load_model(self._directory, self._model_config, self._task, self._device, self._dtype, self._group)
        heads = local_heads(self._model_config, self._group.size)
        tokenizer = self._directory / "tokenizer.json"
        if self._device.type == "cpu":
            decoder, self.facts = load_cpu_decoder(
                model,
                heads,
                self.facts,
                self._config,
                tokenizer=tokenizer,
                num_threads=self._num_threads,
                group=self._group,
            )
            return decoder
        from rose.cuda_decoder_load import load_cuda_decoder  # needs Triton

        cuda_decoder, self.facts = load_cuda_decoder(
            model,
            heads,
            self.facts,
            self._config,
            device=self._device,
            dtype=self._dtype,
            tokenizer=tokenizer,
            shapes=self._shapes,
            group=self._group,
        )
        return cuda_decoder
