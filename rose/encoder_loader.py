"""Encoders on their way to a device: facts from files, weights at load, and a first step. See rose.model_runner."""

import os
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import encode_layout, local_slots
from rose.batch import write_plain_rows
from rose.config import RankConfig
from rose.cpu_encoder import CpuEncoder
from rose.device import resolve_device, resolve_dtype
from rose.distributed.group import ALONE, Group, form_group
from rose.distributed.shard import check_sizes, local_heads
from rose.encoder import load_encoder
from rose.encoder_facts import encoder_facts
from rose.model_runner import Loaded, ModelRunner
from rose.models.config import ModelError, read_config
from rose.models.task import GenerateTask, read_task

CPU_WARM_UP_TOKENS = 2048  # a CPU has no memory to reserve: larger shapes need no trial


class EncoderLoader:
    """A model that embeds or scores. `facts` are final from the start; everything else waits for `load`.

    `shapes` is a file for the list of shapes that have graphs; without it every start begins without one.
    """

    kind: Literal["encode"] = "encode"

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
        self.group: Group = ALONE

    def load(self, join: Join | None) -> Loaded:
        """Forms the group and reads the weights. Raises ModelError, torch.OutOfMemoryError."""
        self.group = form_group(join, self._device, shared_sums=self._config.shared_sums)
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(self._config.memory_fraction)
        parts = load_encoder(self._directory, self._model_config, self._task, self._device, self._dtype, self.group)
        if self._device.type == "cpu":
            cpu_encoder = CpuEncoder(parts, self.facts, self._num_threads, self.group)
            return Loaded(cpu_encoder, cpu_encoder.encode)
        from rose.cuda_encoder import CudaEncoder  # needs Triton

        cuda_encoder = CudaEncoder(
            parts,
            local_heads(self._model_config, self.group.size),
            self.facts,
            self._config,
            device=self._device,
            dtype=self._dtype,
            shapes=self._shapes,
            group=self.group,
        )
        return Loaded(cuda_encoder, cuda_encoder.encode)

    def warm_up(self, runner: ModelRunner) -> None:
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
        lazy = runner.step(plan, arrays)
        runner.drain()
        lazy.ready()
