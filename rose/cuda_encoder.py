"""An encoder's steps on a GPU: one copy in, one graph, one copy out. See rose.model_runner for the interface.

Nothing on the way from plan to LazyTensor waits for the device; the host reads offsets and ids, and writes into the
slot only what makes it a padded step.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from ipc.step import ROW_STATUS, STATUS_BAD_TOKEN, STATUS_OK, StepPlan
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts
from rose.attention.backends import Backends
from rose.attention.interface import Attend, AttentionShape, Sequences
from rose.attention.static import StaticAttention
from rose.batch import Int32s, check_step
from rose.config import RankConfig
from rose.cuda_stream import Bytes, CudaStream, StepStream
from rose.distributed.group import ALONE, Group, smallest
from rose.encoder import EncoderParts
from rose.graph_memory import CudaGraphMemory, GraphMemory, UnboundedMemory
from rose.graph_policy import GraphKey, GraphPolicy, encode_shapes, padded_seqs, padded_tokens
from rose.graphs import GraphManager
from rose.layers.kernel_layers import use_kernels
from rose.lazy_tensor import as_step_error
from rose.models.config import ModelConfig, ModelError
from rose.models.task import EmbedTask
from rose.runner import LazyTensor
from rose.shape_list import from_leader, read_shapes, write_shapes
from rose.static_encoder import StaticEncoder
from rose.step_buffers import StepBuffers

TYPICAL_LENGTH = 512  # of the sequences that the crossover is measured with
CROSSOVER_MARGIN = 2.0  # a launching thread has neighbours, the GPU has none


class CudaEncoder:
    """`stream` is the device's; `shapes` is where the list of captured shapes is kept, if anywhere.

    Raises ModelError for an attention backend that cannot run here, torch.OutOfMemoryError.
    """

    def __init__(
        self,
        parts: EncoderParts,
        model: ModelConfig,
        facts: ModelFacts,
        config: RankConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        stream: StepStream | None = None,
        shapes: Path | None = None,
        group: Group = ALONE,
    ) -> None:
        self._facts, self._group, self._device = facts, group, device
        self._num_tokens = self._num_padding = 0
        use_kernels(parts.model)
        self._buffers = StepBuffers(facts, device)
        self._stream = stream or CudaStream(facts.num_steps_in_flight, self._buffers.region_bytes)
        shape = AttentionShape(
            model.num_attention_heads, model.num_key_value_heads, model.head_dim, model.head_dim**-0.5, model.causal
        )
        try:
            self._backends = Backends(
                shape, dtype, device, override=config.attention, num_plans=facts.num_steps_in_flight + 2
            )
        except ValueError as error:
            raise ModelError(str(error)) from None
        pools = isinstance(parts.task, EmbedTask)
        self._encoder = StaticEncoder(
            parts.model,
            None if isinstance(parts.task, EmbedTask) and not parts.task.dense else parts.head,
            self._buffers,
            parts.defaults,
            pools=pools,
            has_token_types=model.type_vocab_size > 1,
        )
        crossover, memory = self._measured()
        crossover = crossover if config.max_graph_tokens is None else config.max_graph_tokens
        self._max_graph_tokens = smallest(group, crossover, device)
        self._shapes = shapes if group.leads else None
        self.graphs = GraphManager(
            self._policy(config),
            self._stream,
            attention=self._static_attention,
            attend_once=self._attend_once,
            forward=self._encoder.forward,
            free_bytes=_free_bytes if device.type == "cuda" else lambda: 0,
            on_capture=self._keep_shapes,
            memory=memory,
        )
        while config.capture == "eager" and self.graphs.capture_listed(self._fill):
            pass
        self._stream.drain()

    def encode(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        """Raises OutOfMemory."""
        outside = check_step(plan, arrays, self._facts)
        num_seqs, num_tokens = plan.num_seqs, plan.num_tokens
        key = self.key(num_seqs, num_tokens)
        table, offsets = cast(Int32s, arrays["rows"][:num_seqs]), cast(Int32s, arrays["cu_seqlens"])
        offsets[num_seqs + 1 : key.num_seqs + 1] = num_tokens  # empty sequences
        if outside is not None:
            for row in range(num_seqs):
                bad = outside[offsets[row] : offsets[row + 1]].any()
                table[row, ROW_STATUS] = STATUS_BAD_TOKEN if bad else STATUS_OK
        self._num_tokens += num_tokens
        self._num_padding += key.num_tokens - num_tokens
        buffers, stream = self._buffers, self._stream
        stream.copy_in(buffers.inputs, cast(Bytes, arrays["inputs"][: buffers.input_bytes(num_tokens)]))
        try:
            self.graphs.run(key, offsets[: key.num_seqs + 1].tolist())
        except torch.OutOfMemoryError as error:
            raise as_step_error(error) from error
        if self._group.leads:
            stream.copy_out(buffers.outputs, cast(Bytes, arrays["outputs"][: buffers.output_bytes(num_seqs)]))
        return stream.finish()

    @property
    def idle_work(self) -> bool:
        return self.graphs.num_waiting > 0

    def idle(self) -> LazyTensor:
        """Captures one listed shape, if any is left."""
        try:
            self.graphs.capture_listed(self._fill)
        except torch.OutOfMemoryError as error:
            raise as_step_error(error) from error
        return self._stream.finish()

    def attach(self, ring: StepRing | None) -> None:
        self._stream.attach(None if ring is None else ring.memory)

    def drain(self) -> None:
        self._stream.drain()

    def close(self) -> None:
        self._stream.drain()

    def figures(self) -> dict[str, float]:
        return {
            **self.graphs.figures(),
            "graph_max_tokens": self._max_graph_tokens,
            "tokens_total": self._num_tokens,
            "padding_tokens_total": self._num_padding,
            **_memory_figures(),
        }

    # --- shapes ---------------------------------------------------------------------------------------------

    def key(self, num_seqs: int, num_tokens: int) -> GraphKey:
        """Of a step of such a size."""
        seqs, tokens = padded_seqs(num_seqs, self._facts.max_num_seqs), padded_tokens(num_tokens)
        return GraphKey("encode", seqs, tokens, 0, self._backends.choose(seqs, tokens))

    def _policy(self, config: RankConfig) -> GraphPolicy:
        facts = self._facts
        listed = [] if self._shapes is None else read_shapes(self._shapes)
        known = from_leader(self._group, listed, self._device)
        if config.capture == "eager":
            most = min(self._max_graph_tokens, padded_tokens(facts.max_num_batched_tokens))
            known += [self.key(*shape) for shape in encode_shapes(facts.max_num_seqs, most, facts.max_model_len)]
        known = [key for key in dict.fromkeys(known) if self._is_ours(key)]
        return GraphPolicy(config.capture, max_graphs=config.max_graphs, max_tokens=self._max_graph_tokens, known=known)

    def _is_ours(self, key: GraphKey) -> bool:
        """Whether steps can still have this key: limits and choices may have changed since it was listed."""
        fits = key.num_seqs <= self._facts.max_num_seqs and key.num_tokens <= len(self._buffers.positions)
        return fits and key == self.key(key.num_seqs, key.num_tokens)

    def _keep_shapes(self) -> None:
        if self._shapes is not None:
            write_shapes(self._shapes, reversed(self.graphs.keys))

    def _fill(self, key: GraphKey) -> list[int]:
        """Makes the buffers a step of `key`'s: sequences of about equal length, of whatever ids are there."""
        each = min(-(-key.num_tokens // key.num_seqs), self._facts.max_model_len)
        offsets = torch.arange(key.num_seqs + 1, dtype=torch.int32, device=self._buffers.cu_seqlens.device)
        self._buffers.cu_seqlens[: key.num_seqs + 1] = offsets.mul_(each).clamp_(max=key.num_tokens)
        self._buffers.rows[: key.num_seqs].zero_()
        return [min(row * each, key.num_tokens) for row in range(key.num_seqs + 1)]

    # --- attention ------------------------------------------------------------------------------------------

    def _static_attention(self, key: GraphKey) -> StaticAttention:
        return self._backends.static(key.backend, self._buffers.cu_seqlens[: key.num_seqs + 1], key.num_tokens)

    def _attend_once(self, key: GraphKey, offsets: list[int]) -> Attend:
        sequences = Sequences(offsets, self._buffers.cu_seqlens[: key.num_seqs + 1])
        return self._backends.once(key.backend, sequences, key.num_tokens)

    # --- the largest step -----------------------------------------------------------------------------------

    def _measured(self) -> tuple[int, GraphMemory]:
        """Tokens of a step from which on the GPU takes longer than launching its kernels one by one takes the host;
        what graphs may take beside the largest step."""
        num_tokens = len(self._buffers.positions)
        if self._buffers.inputs.device.type != "cuda":
            return num_tokens, UnboundedMemory()
        length = min(TYPICAL_LENGTH, self._facts.max_model_len)
        key = self.key(min(max(1, num_tokens // length), self._facts.max_num_seqs), num_tokens)
        offsets = self._fill(key)

        def run() -> None:
            self._encoder.forward(key, self._attend_once(key, offsets))

        run()  # compiles, and makes what stays
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        run()
        step_bytes = torch.cuda.memory_reserved() - before  # with what lies unused between tensors
        launch_ms, device_ms = _time_launch(run)
        crossover = padded_tokens(int(CROSSOVER_MARGIN * num_tokens * launch_ms / device_ms) + 1)
        return crossover, CudaGraphMemory(step_bytes)


def _time_launch(run: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds that the host takes to enqueue `run`, and the device to do it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    begin.record()
    run()
    end.record()
    launch_ms = (time.perf_counter() - started) * 1000
    end.synchronize()
    return launch_ms, begin.elapsed_time(end)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def _memory_figures() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {}
    return {
        "device_memory_allocated_bytes": torch.cuda.memory_allocated(),
        "device_memory_reserved_bytes": torch.cuda.memory_reserved(),
        "device_memory_peak_bytes": torch.cuda.max_memory_allocated(),
    }
