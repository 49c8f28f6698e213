"""Our own attention over a paged cache, in Triton. Lengths and block tables are read on the device: nothing to plan.

Steps of rows with few queries (decode, verify) and of longer ones have a kernel each; a step with prompts launches
both, over the same rows: those of one query go to the kernel that divides their keys among programs. A prompt alone
needs but one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rose.attention.interface import Attend, AttentionShape
from rose.attention.paged import Append, PagedKV, PagedRows
from rose.kernels.kv_append import kv_append
from rose.kernels.paged_attention import MAX_SHORT, new_counters, paged_attention
from rose.kernels.paged_prefill import paged_prefill


class TritonPagedBackend:
    """For the steps of one stream, which share counters. float16 and bfloat16; head_dim a power of two from 16 on."""

    def __init__(self) -> None:
        self._counters: Tensor | None = None  # never replaced: graphs know their place

    def paged(self, rows: PagedRows, caches: Sequence[PagedKV]) -> Attend:
        return TritonPaged(rows, caches, self._counters_on(rows.kv_lengths.device))

    def static(self, rows: PagedRows, caches: Sequence[PagedKV], shape: AttentionShape) -> "TritonPaged":
        return TritonPaged(rows, caches, self._counters_on(rows.kv_lengths.device))

    def _counters_on(self, device: torch.device) -> Tensor:
        if self._counters is not None:
            return self._counters
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return new_counters(device)  # the graph's own, which each replay makes zero: nobody else may use them
        self._counters = new_counters(device)
        return self._counters


class TritonPaged:
    """Launches the same for any lengths, so a graph of it is right for all steps of the same bounds."""

    def __init__(self, rows: PagedRows, caches: Sequence[PagedKV], counters: Tensor) -> None:
        self._rows = rows
        self._caches = caches
        self._counters = counters
        self._layer = 0  # of the next call
        self._appended = False  # its keys and values

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        """Nothing to plan; the next call is the first layer's, also where a pass before it broke off."""
        self._layer, self._appended = 0, False

    def append_before(self) -> Append:
        """As rose.attention.paged.AppendsBefore's."""
        self._appended = True
        return Append(*self._caches[self._layer], self._rows.slot_mapping)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        rows, cache = self._rows, self._caches[self._layer]
        self._layer = (self._layer + 1) % len(self._caches)
        if not self._appended:
            kv_append(k, v, cache.k, cache.v, rows.slot_mapping)
        self._appended = False
        where = (cache.k, cache.v, rows.cu_seqlens_q, rows.kv_lengths, rows.block_table)
        short = rows.max_q_len if rows.max_q_len <= MAX_SHORT else 1
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if rows.max_q_len > MAX_SHORT and len(rows.kv_lengths) == 1:
            return paged_prefill(q, *where, scale=shape.scale, out=out)
        if rows.max_q_len > MAX_SHORT:
            paged_prefill(q, *where, scale=shape.scale, min_q_len=short + 1, out=out)
        paged_attention(q, *where, scale=shape.scale, max_q_len=short, out=out, counters=self._counters)
        return out
