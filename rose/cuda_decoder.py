"""A language model's steps on a GPU. See rose.model_runner for the interface.

A step of decode or verify rows alone is one copy in, one graph, one copy out; what else a step may hold (sequences that
come and go, new blocks) is a few launches on small tensors before it. Steps with prompts take rose.decoder's way; of
small ones the forward pass is a graph. Nothing on the way from plan to LazyTensor waits for the device, but with
grammars: the masks of a step need the tokens of the one before, and its forward pass runs meanwhile. With grammars and
drafts they need these drafts, too, and wait for the forward pass.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ipc.step import GEN_DRAFT_LENGTH, GEN_KIND, GEN_MAX_LENGTH, GEN_SLOT, KIND_PREFILL, STATUS_OK, StepPlan
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts
from rose.attention.interface import AttentionShape
from rose.attention.paged import PagedKV
from rose.attention.paged_choice import PagedBackends
from rose.attention.paged_triton import TritonPagedBackend
from rose.attention.static import StaticAttention
from rose.config import RankConfig
from rose.cuda_stream import Bytes, CudaStream, StepStream
from rose.decode_buffers import DecodeBuffers
from rose.decode_staging import Landing, StagedMasks, StagedOutputs
from rose.decoder import Decoder, DecoderParts, LanguageModel
from rose.distributed.group import ALONE, Group, leaders
from rose.generate_batch import GenerateRows, read_rows
from rose.graph_memory import GraphMemory
from rose.graph_policy import GraphKey, GraphPolicy, padded_seqs
from rose.graphs import GraphManager
from rose.layers.kernel_layers import use_kernels
from rose.lazy_tensor import as_step_error
from rose.models.config import ModelConfig, ModelError
from rose.residents import Residents
from rose.runner import LazyTensor, OutOfMemory
from rose.sampling.params import Needs
from rose.shape_list import from_leader, read_shapes, write_shapes
from rose.speculation.lengths import drafts_of_step
from rose.speculation.no_drafts import NoDraftsSource
from rose.speculation.protocol import ProposerParts, ProposerSource
from rose.static_decoder import StaticDecoder, attention_of, decode_key, keeps_draft, needs_of, stops
from rose.static_forward import MAX_TOKENS, StaticForward, small_tokens

COMMON_NEEDS = (Needs(), Needs(random=True), Needs(random=True, truncation=True))  # captured ahead, if anything is


class CudaDecoder:
    """`tokenizer` is the model's tokenizer.json; `stream` is the device's; `shapes` is where the list of captured
    shapes is kept, if anywhere. `source` has who drafts, over `draft_caches` of its shape. `memory` bounds what graphs
    take.

    Raises ModelError for an attention backend that cannot run here, torch.OutOfMemoryError.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: Sequence[PagedKV],
        model_config: ModelConfig,
        facts: ModelFacts,
        config: RankConfig,
        *,
        device: torch.device,
        tokenizer: Path,
        stream: StepStream | None = None,
        shapes: Path | None = None,
        group: Group = ALONE,
        source: ProposerSource | None = None,
        draft_caches: Sequence[PagedKV] = (),
        memory: GraphMemory | None = None,
    ) -> None:
        use_kernels(model)
        language_model = cast(LanguageModel, model)
        self._facts, self._caches, self._group = facts, caches, group
        self._shapes = shapes if group.leads else None
        self.residents = Residents(facts, device, tokenizer)
        source = source or NoDraftsSource()
        # of the leader's proposer: what `keep_draft` is about, and the same keys on every rank
        self._has_state = bool(leaders(group, source.kv_shape is not None, device))
        proposer = source.open(ProposerParts(self.residents, draft_caches, TritonPagedBackend(), caches))
        self._nobody, self._device = facts.max_num_seqs, device
        self._buffers = DecodeBuffers(facts, self.residents.slots.block_table.shape[1], device)
        self._staged = StagedOutputs(facts, facts.num_steps_in_flight + 1, device)
        self._stream = stream or CudaStream(facts.num_steps_in_flight, self._staged.region_bytes)
        self._attention = paged_backends(model_config, caches[0].k.dtype, device, config)
        self.key = cache(self._key)
        """Of a step of so many decode rows: what their sampling needs, the plan's draft length, whether it keeps the
        drafts' state, whether it stops at the logits."""
        max_tokens = MAX_TOKENS if config.max_graph_tokens is None else config.max_graph_tokens
        max_tokens = 0 if config.capture == "off" else max_tokens  # padding would be for nothing
        self._small = StaticForward(
            language_model,
            self.residents.slots,
            max_tokens=min(max_tokens, facts.max_num_batched_tokens),
            max_num_seqs=facts.max_num_seqs,
            hidden=(model_config.hidden_size, caches[0].k.dtype),
            attention="triton",
            run=lambda key: self.graphs.run(key, [0] * (key.num_seqs + 1)),
        )
        parts = DecoderParts(self._small, caches, self._attention)
        self._decoder = Decoder(parts, self.residents, facts, proposer, group)
        self._agreement = self._decoder.agreement
        self._static = StaticDecoder(language_model, self.residents, self._buffers, self._agreement, proposer)
        self._failed_step = 0  # the newest that ran out of memory
        self._masks = StagedMasks(facts, facts.num_steps_in_flight + 1, device)
        self._unsettled: deque[Landing] = deque()  # steps whose tokens grammars have not seen
        self._num_rows = self._num_padding = 0
        self.graphs = self._make_graphs(config, memory)
        while config.capture == "eager" and self.graphs.capture_listed(self._fill):
            pass
        self._stream.drain()

    @torch.inference_mode()
    def generate(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        """Raises OutOfMemory: the tables hold, the rows did nothing."""
        if plan.num_admissions:
            self._settle()  # a slot's next sequence has another grammar
        if plan.last_applied < self._failed_step:
            self.residents.apply_tables(plan, arrays)
            raise OutOfMemory(f"planned on top of step {self._failed_step}, which did not fit")
        table = arrays["rows"][: plan.num_seqs]
        decodes = plan.num_seqs > 0 and (table[:, GEN_KIND] != KIND_PREFILL).all()
        launch = self._decode if decodes else self._launch_any
        try:
            return launch(plan, arrays)
        except (RuntimeError, MemoryError) as error:
            step_error = as_step_error(error)
            if not isinstance(step_error, OutOfMemory):
                raise
            self._failed_step = plan.step
            raise step_error from error

    @property
    def idle_work(self) -> bool:
        return self.graphs.num_waiting > 0

    @torch.inference_mode()
    def idle(self) -> LazyTensor:
        """Captures one listed shape, if any is left."""
        try:
            self.graphs.capture_listed(self._fill)
        except torch.OutOfMemoryError as error:
            raise as_step_error(error) from error
        return self._stream.finish()

    @torch.inference_mode()
    def attach(self, ring: StepRing | None) -> None:
        self._unsettled.clear()
        self._decoder.clear()
        self._failed_step = 0
        self._stream.attach(None if ring is None else ring.memory)

    def drain(self) -> None:
        self._stream.drain()

    def close(self) -> None:
        self._stream.drain()

    def figures(self) -> dict[str, float]:
        return {
            **self.graphs.figures(),
            "decode_rows_total": self._num_rows,
            "padding_rows_total": self._num_padding,
        }

    # --- steps ----------------------------------------------------------------------------------------------

    def _decode(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        """Decode or verify rows only: one graph; with grammars among them, one up to the logits."""
        self.residents.apply_tables(plan, arrays)
        rows = read_rows(plan, arrays, self._facts, self.residents.host)
        needs = self.residents.sampler.needs(rows.slots.tolist())
        has_grammars = self.residents.grammars.has_any(rows.slots.tolist())
        key = self.key(plan.num_seqs, needs, plan.draft_length, plan.keep_draft, has_grammars)
        self._num_rows += plan.num_seqs
        self._num_padding += key.num_seqs - plan.num_seqs
        arrays["rows"][plan.num_seqs : key.num_seqs, [GEN_SLOT, GEN_DRAFT_LENGTH]] = self._nobody, 0
        buffers, stream = self._buffers, self._stream
        stream.copy_in(buffers.table_bytes, buffers.slot_table(arrays, key.num_seqs))
        self.graphs.run(key, _key_bounds(rows, key.num_seqs))
        if has_grammars:
            self._finish(key, needs, rows)
        if self._group.leads:
            num_bytes = buffers.output_bytes(logprobs=needs.logprobs)
            stream.copy_out(buffers.outputs, cast(Bytes, arrays["outputs"][:num_bytes]))
        lazy = stream.finish()
        if self._group.size == 1 and not has_grammars and (rows.status == STATUS_OK).all():
            return lazy
        landing = Landing(lazy, partial(self._land, rows, arrays))
        if has_grammars:
            self._unsettled.append(landing)
        return landing

    def _finish(self, key: GraphKey, needs: Needs, rows: GenerateRows) -> None:
        """The rest of a step that has stopped at its logits."""
        try:
            self._settle()  # while the forward pass runs
            self._static.finish(key, needs, self._masks_of(key, rows) if self._group.leads else None)
        finally:
            if self.graphs.graph(key) is None:
                self._static.forget(key)

    def _launch_any(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        """Any rows, without a graph; outputs by way of page-locked memory."""
        self._settle()
        staged, landing = self._staged.take(arrays)
        self._decoder.run(plan, staged)
        return Landing(self._stream.finish(), partial(self._land_any, landing))

    def _masks_of(self, key: GraphKey, rows: GenerateRows) -> Tensor:
        """int32 [T, ceil(V / 32)] of the step that has stopped at its logits."""
        count = len(rows.table)
        drafts = self._static.drafts(key)[:count] if key.q > 1 else None
        every = rows.with_drafts(np.full(count, key.q - 1, np.int32))  # padding counts as drafts: a line for each place
        return self._masks.put(self.residents.grammars.masks(every, drafts), key.num_tokens)

    def _settle(self) -> None:
        """Waits for the steps whose tokens masks depend on: grammars then know them all."""
        while self._unsettled:
            landing = self._unsettled.popleft()
            while not landing.ready():
                pass

    def _land(self, rows: GenerateRows, arrays: Arrays) -> None:
        """Rows that failed before the step ran took part, and answer nothing. Raises Diverged."""
        self._agreement.landed()
        if not self._group.leads:
            return
        failed = np.flatnonzero(rows.status != STATUS_OK)
        arrays["status"][failed] = rows.status[failed]
        arrays["num_tokens"][failed] = 0
        num_rows = len(rows.table)
        self.residents.grammars.accept(
            rows, arrays["tokens"][:num_rows].tolist(), arrays["num_tokens"][:num_rows].tolist()
        )

    def _land_any(self, landing: Callable[[], None]) -> None:
        """Raises Diverged."""
        self._agreement.landed()
        if self._group.leads:
            landing()

    # --- shapes ---------------------------------------------------------------------------------------------

    def _make_graphs(self, config: RankConfig, memory: GraphMemory | None) -> GraphManager:
        return GraphManager(
            self._policy(config),
            self._stream,
            attention=self._static_attention,
            attend_once=lambda key, _: self._attention.paged(self._static_of(key).paged_rows(key), self._caches),
            forward=lambda key, attend: self._static_of(key).forward(key, attend),
            free_bytes=_free_bytes if self._device.type == "cuda" else lambda: 0,
            on_capture=self._keep_shapes,
            memory=memory,
            forget=self._static.forget,
        )

    def _key(
        self, num_rows: int, needs: Needs, draft_length: int = 0, keep_draft: bool = True, stops: bool = False
    ) -> GraphKey:
        padded = padded_seqs(num_rows, self._facts.max_num_seqs)
        attention = self._attention.choose(padded, draft_length + 1)
        keep_draft = keep_draft or not self._has_state
        return decode_key(padded, attention, needs, draft_length=draft_length, keep_draft=keep_draft, stops=stops)

    def _policy(self, config: RankConfig) -> GraphPolicy:
        most = self._facts.max_num_seqs
        listed = [] if self._shapes is None else read_shapes(self._shapes)
        known = [key for key in from_leader(self._group, listed, self._device) if self._is_ours(key)]
        if config.capture == "eager":
            sizes = sorted({padded_seqs(n, most) for n in range(1, most + 1)})
            known += [
                self.key(size, needs, *drafts)
                for needs in COMMON_NEEDS
                for size in sizes
                for drafts in self._drafts_of(size)
            ]
        most_tokens = max(most * (self._facts.max_draft_tokens + 1), small_tokens(self._small.max_tokens))
        known = list(dict.fromkeys(known))
        return GraphPolicy(config.capture, max_graphs=config.max_graphs, max_tokens=most_tokens, known=known)

    def _drafts_of(self, padded: int) -> list[tuple[int, bool]]:
        """(drafts of a row, whether their state is kept) of steps that are padded to so many rows."""
        most = self._facts.max_num_seqs
        counts = (count for count in range(1, padded + 1) if padded_seqs(count, most) == padded)
        return sorted({drafts_of_step(self._facts, count) for count in counts})

    def _is_ours(self, key: GraphKey) -> bool:
        """Whether steps can still have this key: limits and choices may have changed since it was listed."""
        if key.num_seqs > self._facts.max_num_seqs or key.q > self._facts.max_draft_tokens + 1:
            return False
        if key.q == 0:
            return self._small.fits(key)
        try:
            return key == self.key(key.num_seqs, needs_of(key), key.q - 1, keeps_draft(key), stops(key))
        except TypeError:  # sampling has no such need any more
            return False

    def _keep_shapes(self) -> None:
        if self._shapes is not None:
            write_shapes(self._shapes, reversed(self.graphs.keys))

    def _fill(self, key: GraphKey) -> list[int]:
        """Makes the buffers a step of nobody's rows."""
        if key.q == 0:
            self._small.clear(key)
        table = self._buffers.table[: key.num_seqs]
        table[:, GEN_SLOT], table[:, GEN_DRAFT_LENGTH] = self._nobody, 0
        return [0] * (key.num_seqs + 1)

    def _static_attention(self, key: GraphKey) -> StaticAttention:
        return self._attention.static(attention_of(key), self._static_of(key).paged_rows(key), self._caches)

    def _static_of(self, key: GraphKey) -> StaticDecoder | StaticForward:
        return self._static if key.q else self._small


def paged_backends(model: ModelConfig, dtype: torch.dtype, device: torch.device, config: RankConfig) -> PagedBackends:
    """Raises ModelError for an attention backend that cannot run here."""
    shape = AttentionShape(
        model.num_attention_heads, model.num_key_value_heads, model.head_dim, model.head_dim**-0.5, model.causal
    )
    try:
        return PagedBackends(shape, dtype, device, override=config.attention, num_plans=config.num_steps_in_flight + 2)
    except ValueError as error:
        raise ModelError(str(error)) from None


def _key_bounds(rows: GenerateRows, num_seqs: int) -> list[int]:
    """Offsets [num_seqs + 1] of the keys that each row has at most; rows that pad the step have none."""
    bounds = np.zeros(num_seqs + 1, np.int64)
    bounds[1 : len(rows.table) + 1] = rows.table[:, GEN_MAX_LENGTH]
    return bounds.cumsum().tolist()


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]
