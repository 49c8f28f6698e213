"""The runner of encoders: facts from files, weights at load, one launch per step. See rose.runner for the contract.

In one process (bulk jobs, tests) drive it with ipc.step_ring.local_slots and a plan of your own.
"""

import os
from pathlib import Path
from typing import Protocol

import torch
from msgspec.structs import replace

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing, encode_layout, local_slots
from ipc.types import ModelFacts
from rose.batch import write_plain_rows
from rose.config import RankConfig
from rose.cpu_encoder import CpuEncoder
from rose.device import resolve_device, resolve_dtype
from rose.distributed.group import ALONE, Group, form_group
from rose.distributed.shard import check_sizes, local_heads
from rose.encoder import load_encoder
from rose.encoder_facts import encoder_facts
from rose.models.config import ModelError, read_config
from rose.models.task import GenerateTask, read_task
from rose.runner import LazyTensor, OutOfMemory

CPU_WARM_UP_TOKENS = 2048  # a CPU has no memory to reserve: larger shapes need no trial


class DeviceEncoder(Protocol):
    """A loaded encoder on one kind of device: rose.cpu_encoder, rose.cuda_encoder."""

    def encode(self, plan: StepPlan, arrays: Arrays) -> LazyTensor: ...

    @property
    def idle_work(self) -> bool: ...

    def idle(self) -> LazyTensor:
        """A bit of what the device does when there is nothing to do."""

    def attach(self, ring: StepRing | None) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...

    def figures(self) -> dict[str, float]: ...


class EncoderRunner:
    """Embeds or scores. `facts` are final from the start; everything else waits for `load`.

    `shapes` is a file for the list of shapes that have graphs; without it every start begins without one.
    """

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
        if isinstance(task, GenerateTask):
            raise ModelError(
                f'{directory} is a language model: set task = "embed" to serve its pooled states, or task = "score" '
                "for a reranker that answers yes or no"
            )
        self._task = task
        self._device = torch.device(resolve_device(config.device))
        self._dtype = resolve_dtype(config.dtype, self._device.type)
        self._num_threads = config.num_threads or len(os.sched_getaffinity(0))
        check_sizes(self._model_config, tensor_parallel_size)
        facts = encoder_facts(
            name=name,
            directory=directory,
            model=self._model_config,
            task=self._task,
            config=config,
            device=self._device.type,
            dtype=str(self._dtype).removeprefix("torch."),
            num_threads=self._num_threads,
        )
        self.facts = replace(facts, tensor_parallel_size=tensor_parallel_size)
        self._group: Group = ALONE
        self._encoder: DeviceEncoder | None = None

    def load(self, join: Join | None = None) -> ModelFacts:
        """Forms the group, reads the weights and runs the largest admissible step once.

        Raises ModelError, OutOfMemory.
        """
        self._group = form_group(join, self._device)
        try:
            self._encoder = self._load()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from error
        self._warm_up()
        return self.facts

    def attach(self, ring: StepRing | None) -> None:
        self._loaded.attach(ring)

    def step(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        if plan.kind == "idle":
            return self._loaded.idle()
        assert plan.kind == "encode", f"an encoder was sent a {plan.kind} step: check which planner serves this model"
        return self._loaded.encode(plan, arrays)

    def drain(self) -> None:
        if self._encoder is not None:
            self._encoder.drain()

    def close(self) -> None:
        """Ends the threads. A process that ends anyway need not call it."""
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None

    def figures(self) -> dict[str, float]:
        return self._loaded.figures()

    @property
    def idle_work(self) -> bool:
        return self._loaded.idle_work

    @property
    def _loaded(self) -> DeviceEncoder:
        assert self._encoder is not None, "nothing is loaded: call load() first"
        return self._encoder

    def _load(self) -> DeviceEncoder:
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(self._config.memory_fraction)
        parts = load_encoder(self._directory, self._model_config, self._task, self._device, self._dtype, self._group)
        if self._device.type == "cpu":
            return CpuEncoder(parts, self.facts, self._num_threads, self._group)
        from rose.cuda_encoder import CudaEncoder  # needs Triton

        return CudaEncoder(
            parts,
            local_heads(self._model_config, self._group.size),
            self.facts,
            self._config,
            device=self._device,
            dtype=self._dtype,
            shapes=self._shapes,
            group=self._group,
        )

    def _warm_up(self) -> None:
        """One real step through everything: as many sequences of full length as fit, then the rest."""
        facts = self.facts
        arrays = local_slots(encode_layout(facts))[0]
        limit = facts.max_num_batched_tokens
        total = min(limit, max(CPU_WARM_UP_TOKENS, facts.max_model_len)) if self._device.type == "cpu" else limit
        lengths = [facts.max_model_len] * (total // facts.max_model_len)
        if rest := total % facts.max_model_len:
            lengths.append(rest)
        lengths = lengths[: facts.max_num_seqs]
        write_plain_rows(arrays, lengths, facts.dimension)
        plan = StepPlan(
            epoch=0, step=0, slot=0, kind="encode", num_seqs=len(lengths), num_tokens=sum(lengths), canary=True
        )
        lazy = self.step(plan, arrays)
        self.drain()
        lazy.ready()
