"""The runner of encoders: facts from files, weights at load, one launch per step. See rose.runner for the contract.

In one process (bulk jobs, tests) drive it with ipc.step_ring.local_slots and a plan of your own.
"""

import os
from functools import partial
from pathlib import Path

import torch

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing, encode_layout, local_slots
from ipc.types import ModelFacts
from rose.attention.sdpa import SdpaBackend
from rose.batch import Rows, step_rows, write_plain_rows
from rose.config import RankConfig
from rose.cpu_stream import CpuStream
from rose.device import launch_on_cuda, pin, resolve_device, resolve_dtype, unpin
from rose.encoder import Encoder, load_encoder
from rose.encoder_facts import encoder_facts
from rose.models.config import read_config
from rose.models.task import read_task
from rose.runner import LazyTensor

CPU_WARM_UP_TOKENS = 2048  # a CPU has no memory to reserve: larger shapes need no trial


class EncoderRunner:
    """Embeds or scores. `facts` are final from the start; everything else waits for `load`."""

    def __init__(self, name: str, directory: Path, config: RankConfig) -> None:
        self._directory = directory
        self._model_config = read_config(directory)
        self._task = read_task(directory, self._model_config, config.task)
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self._num_threads = config.num_threads or len(os.sched_getaffinity(0))
        self.facts = encoder_facts(
            name=name,
            directory=directory,
            model=self._model_config,
            task=self._task,
            config=config,
            device=self._device,
            dtype=str(self._dtype).removeprefix("torch."),
            num_threads=self._num_threads,
        )
        self._encoder: Encoder | None = None
        self._stream: CpuStream | None = None
        self._pinned: StepRing | None = None

    def load(self, join: Join | None = None) -> ModelFacts:
        """Reads the weights and runs the largest admissible step once. Raises ModelError, OutOfMemory."""
        self._encoder = load_encoder(
            self._directory,
            self._model_config,
            self._task,
            device=self._device,
            dtype=self._dtype,
            attention=SdpaBackend(),
        )
        if self._device == "cpu":
            self._stream = CpuStream(self._num_threads)
        self._warm_up()
        return self.facts

    def attach(self, ring: StepRing | None) -> None:
        if self._device == "cpu":
            return
        if self._pinned is not None:
            unpin(self._pinned.memory)
        self._pinned = ring if ring is not None and pin(ring.memory) else None

    def step(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        assert self._encoder is not None, "step before load: call load() first"
        if plan.kind == "idle":
            return self._launch([])
        assert plan.kind == "encode", f"an encoder was sent a {plan.kind} step: check which planner serves this model"
        max_parts = 1 if self._stream is None else self._num_threads
        return self._launch(step_rows(plan, arrays, self.facts, max_parts))

    def drain(self) -> None:
        if self._stream is not None:
            self._stream.drain()
        elif self._encoder is not None:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Ends the threads. A process that ends anyway need not call it."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _launch(self, parts: list[Rows]) -> LazyTensor:
        encoder = self._encoder
        assert encoder is not None
        works = [partial(encoder.run, part) for part in parts]
        return launch_on_cuda(works) if self._stream is None else self._stream.launch(works)

    def _warm_up(self) -> None:
        """One real step through everything: as many sequences of full length as fit, then the rest."""
        facts = self.facts
        arrays = local_slots(encode_layout(facts))[0]
        limit = facts.max_num_batched_tokens
        total = min(limit, max(CPU_WARM_UP_TOKENS, facts.max_model_len)) if self._device == "cpu" else limit
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
