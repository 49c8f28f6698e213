"""The runner of encoders: facts from files, weights at load, one launch per step. See rose.runner for the contract.

In one process (bulk jobs, tests) drive it with ipc.step_ring.local_slots and a plan of your own.
"""

import os
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ipc.control import Join
from ipc.step import DTYPE_CODES, ROW_DTYPE, ROW_OUTPUT_OFFSET, StepPlan
from ipc.step_ring import Arrays, StepRing, encode_layout, local_slots
from ipc.types import ModelFacts
from rose.attention.sdpa import SdpaBackend
from rose.config import RankConfig
from rose.cpu_stream import CpuStream
from rose.device import launch_on_cuda, pin, resolve_device, resolve_dtype, unpin
from rose.encoder import Encoder, Rows, load_encoder
from rose.models.config import ModelConfig, ModelError, read_config
from rose.models.task import EmbedTask, ScoreTask, read_task, trained_max_len
from rose.runner import LazyTensor

CPU_BATCHED_TOKENS = 1024  # 97 % of the peak rate of a small model is reached below this
CUDA_BATCHED_TOKENS = 16384
CPU_WARM_UP_TOKENS = 2048  # a CPU has no memory to reserve: larger shapes need no trial
MIN_PART_TOKENS = 32  # a part of a step that is worth a thread of its own


class EncoderRunner:
    """Embeds or scores. `facts` are final from the start; everything else waits for `load`."""

    def __init__(self, name: str, directory: Path, config: RankConfig) -> None:
        self._directory = directory
        self._config = config
        self._model_config = read_config(directory)
        self._task = read_task(directory, self._model_config)
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self.facts = _facts(name, self._model_config, self._task, config, self._device, self._dtype, directory)
        self._num_threads = config.num_threads or len(os.sched_getaffinity(0))
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
        if ring is not None:
            pin(ring.memory)
        self._pinned = ring

    def step(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        assert self._encoder is not None, "step before load: call load() first"
        if plan.kind == "idle":
            return self._launch([])
        assert plan.kind == "encode", f"an encoder was sent a {plan.kind} step: check which planner serves this model"
        return self._launch(self._parts(plan, arrays))

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
        if self._stream is None:
            return launch_on_cuda([partial(encoder.run, part) for part in parts])
        cores = max(1, self._num_threads // max(1, len(parts)))
        return self._stream.launch([(partial(encoder.run, part), cores) for part in parts])

    def _parts(self, plan: StepPlan, arrays: Arrays) -> list[Rows]:
        """The step's rows, checked; on CPU divided among the threads."""
        n, t = plan.num_seqs, plan.num_tokens
        cu_seqlens = arrays["cu_seqlens"][: n + 1]
        rises = n > 0 and cu_seqlens[0] == 0 and cu_seqlens[n] == t and bool((np.diff(cu_seqlens) > 0).all())
        assert rises, f"step {plan.step}: cu_seqlens must rise from 0 to {t} by one or more: refuse empty inputs"
        input_ids, bad = _check_ids(arrays["input_ids"][:t], cu_seqlens, self.facts.vocab_size)
        status, values = torch.from_numpy(arrays["status"]), torch.from_numpy(arrays["values"])
        cuts = _cuts(cu_seqlens, self._num_threads if self._stream is not None else 1)
        return [
            Rows(
                input_ids=input_ids[cu_seqlens[first] : cu_seqlens[last]],
                cu_seqlens=cu_seqlens[first : last + 1],
                table=arrays["rows"][first:last],
                bad_tokens=bad[first:last],
                status=status[first:last],
                values=values,
            )
            for first, last in pairwise(cuts)
        ]

    def _warm_up(self) -> None:
        """One real step through everything: as many sequences of full length as fit, then the rest."""
        facts = self.facts
        arrays = local_slots(encode_layout(facts))[0]
        limit = facts.max_num_batched_tokens
        total = min(limit, max(CPU_WARM_UP_TOKENS, facts.max_model_len)) if self._device == "cpu" else limit
        ends = [*range(facts.max_model_len, total, facts.max_model_len), total][: facts.max_num_seqs]
        arrays["cu_seqlens"][1 : len(ends) + 1] = ends
        plan = StepPlan(epoch=0, step=0, slot=0, kind="encode", num_seqs=len(ends), num_tokens=ends[-1])
        row_bytes = 4 * facts.dimension
        fill_default_rows(arrays["rows"][: len(ends)], row_bytes)
        lazy = self.step(plan, arrays)
        self.drain()
        lazy.ready()


def fill_default_rows(table: NDArray[np.generic], row_bytes: int) -> None:
    """Rows of float32 as the model's files want them, one after the other."""
    table[:] = -1
    table[:, ROW_DTYPE] = DTYPE_CODES["float32"]
    table[:, ROW_OUTPUT_OFFSET] = np.arange(0, len(table) * row_bytes, row_bytes)


def _check_ids(
    input_ids: NDArray[np.int32], cu_seqlens: NDArray[np.int32], vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """(ids that are safe to look up, which rows had one outside the vocabulary). The slot itself is not changed."""
    outside = input_ids.view(np.uint32) >= vocab_size  # negative ids wrap to large ones
    if not outside.any():
        return input_ids, np.zeros(len(cu_seqlens) - 1, np.bool_)
    return np.where(outside, 0, input_ids), np.logical_or.reduceat(outside, cu_seqlens[:-1])


def _cuts(cu_seqlens: NDArray[np.int32], num_threads: int) -> list[int]:
    """Row indices that divide a step into at most `num_threads` parts of about equal tokens, first 0, last N."""
    num_rows, num_tokens = len(cu_seqlens) - 1, int(cu_seqlens[-1])
    num_parts = max(1, min(num_rows, num_threads, num_tokens // MIN_PART_TOKENS))
    targets = [num_tokens * part // num_parts for part in range(1, num_parts)]
    middles = (cu_seqlens[:-1] + cu_seqlens[1:]) // 2
    return sorted({0, num_rows, *np.searchsorted(middles, targets).tolist()})


def _facts(
    name: str,
    model: ModelConfig,
    task: EmbedTask | ScoreTask,
    config: RankConfig,
    device: str,
    dtype: torch.dtype,
    directory: Path,
) -> ModelFacts:
    longest = model.max_model_len
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ModelError(f"max_model_len {config.max_model_len} is over the {longest} positions of {directory}")
    max_model_len = config.max_model_len or min(longest, trained_max_len(directory) or longest)
    default_tokens = CPU_BATCHED_TOKENS if device == "cpu" else CUDA_BATCHED_TOKENS
    max_num_batched_tokens = config.max_num_batched_tokens or max(default_tokens, max_model_len)
    if max_num_batched_tokens < max_model_len:
        raise ModelError(
            f"max_num_batched_tokens {max_num_batched_tokens} is below max_model_len {max_model_len}: "
            "a sequence of full length would never fit a step"
        )
    embeds = isinstance(task, EmbedTask)
    return ModelFacts(
        name=name,
        architecture=model.architecture or model.model_type,
        task="embed" if embeds else "score",
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        dimension=task.dimension if isinstance(task, EmbedTask) else task.num_labels,
        max_num_seqs=config.max_num_seqs or min(256, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=str(dtype).removeprefix("torch."),
        pooling=task.pooling if isinstance(task, EmbedTask) else "cls",
        normalize=task.normalize if isinstance(task, EmbedTask) else False,
        device=device,
        num_steps_in_flight=config.num_steps_in_flight,
    )
