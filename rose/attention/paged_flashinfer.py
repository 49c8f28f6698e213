"""FlashInfer's tensor-core decode over a paged cache, for graphs of decode rows.

It is planned on the host before each replay, from upper bounds of the lengths; what it reads of them while it runs, the
list of blocks too, is written by a kernel of the graph from the real ones, which it clamps to. (Its CUDA-core decode
does not: a part planned past a row's end underflows there. Nor does this one for rows of several queries, which end at
other keys: these are refused.) A plan is written to page-locked memory and copied from
there by the stream, so each plan in flight has page-locked memory of its own.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rose.attention.interface import AttentionShape
from rose.attention.paged import PagedKV, PagedRows
from rose.kernels.flat_table import flat_table
from rose.kernels.kv_append import kv_append

_WORKSPACE_BYTES = 128 << 20  # split sums; shared by all plans, since they run on one stream


class FlashInferPagedBackend:
    """`num_plans` at least the steps in flight plus one. Raises ImportError where FlashInfer cannot be imported."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, num_plans: int) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._wrapper = BatchDecodeWithPagedKVCacheWrapper
        self._device, self._dtype, self._num_plans = device, dtype, num_plans
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def static(self, rows: PagedRows, caches: Sequence[PagedKV], shape: AttentionShape) -> "FlashInferPaged":
        """Raises ValueError for rows of several queries."""
        if rows.max_q_len != 1:
            raise ValueError(f"rows of {rows.max_q_len} queries: planned from bounds fa2 is wrong there")
        num_rows, max_blocks = rows.block_table.shape
        buffers = [
            torch.zeros(n, dtype=torch.int32, device=self._device)
            for n in (num_rows + 1, num_rows * max_blocks, num_rows)
        ]
        wrapper = self._wrapper(
            self._workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=buffers[0],
            paged_kv_indices_buffer=buffers[1], paged_kv_last_page_len_buffer=buffers[2],
        )  # fmt: skip
        return FlashInferPaged(wrapper, buffers, rows, caches, shape, self._dtype, self._num_plans)


class FlashInferPaged:
    """Plans and calls of one graph. Its n-th call is layer n's."""

    def __init__(
        self,
        wrapper: Any,
        buffers: list[Tensor],
        rows: PagedRows,
        caches: Sequence[PagedKV],
        shape: AttentionShape,
        dtype: torch.dtype,
        num_plans: int,
    ) -> None:
        self._wrapper, self._buffers, self._rows, self._caches = wrapper, buffers, rows, caches
        self._shape, self._dtype = shape, dtype
        self._block_size = caches[0].block_size
        self._any_blocks = torch.zeros_like(buffers[1])  # of a plan: the real ones follow
        first = wrapper._pin_memory_int_workspace_buffer
        self._pinned = [first, *(torch.empty_like(first, pin_memory=True) for _ in range(num_plans - 1))]
        self._events = [torch.cuda.Event() for _ in range(num_plans)]
        self._turn = self._layer = 0

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        """Offsets [R + 1] of the keys that each row has at most."""
        self._layer = 0
        turn = self._turn = (self._turn + 1) % len(self._pinned)
        self._events[turn].synchronize()  # long done: as many plans ago as there are buffers
        self._wrapper._pin_memory_int_workspace_buffer = self._pinned[turn]
        most = self._rows.max_kv_len
        lengths = [max(1, min(end - begin, most)) for begin, end in pairwise(cu_seqlens_host)]
        num_blocks = torch.tensor([0, *(-(-length // self._block_size) for length in lengths)])
        indptr = num_blocks.cumsum(0).int()
        last = [(length - 1) % self._block_size + 1 for length in lengths]
        self._wrapper.plan(
            indptr, self._any_blocks[: int(indptr[-1])], torch.tensor(last, dtype=torch.int32),
            self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim, self._block_size,
            sm_scale=self._shape.scale, q_data_type=self._dtype,
        )  # fmt: skip
        self._events[turn].record()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        assert shape == self._shape, f"planned for {self._shape}, called with {shape}: one plan serves one shape"
        rows, cache = self._rows, self._caches[self._layer]
        if self._layer == 0:
            flat_table(rows.kv_lengths, rows.block_table, self._block_size, *self._buffers)
        self._layer = (self._layer + 1) % len(self._caches)
        kv_append(k, v, cache.k, cache.v, rows.slot_mapping)
        return self._wrapper.run(q.contiguous(), (cache.k, cache.v))
