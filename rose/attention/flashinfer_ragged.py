"""FlashInfer's ragged prefill kernels, fa2 and fa3. They are planned on the host, from real lengths.

Eagerly: one plan per step and layer shape, on the first layer's call, kept for steps of the same lengths. Under a
graph: `prepare` plans into buffers whose addresses the graph holds. A plan is written to page-locked memory and
copied from there by the stream, so each plan in flight has page-locked memory of its own.

FlashInfer has no head_dim 32: q, k and v are padded with zeros to 64, which changes no score.
"""

from collections import OrderedDict
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.attention.interface import Attend, AttentionShape, Sequences

_WORKSPACE_BYTES = 128 << 20  # split sums; shared by all plans, since they run on one stream
_MIN_HEAD_DIM = 64

Kernel = Literal["fa2", "fa3"]


class FlashInferBackend:
    """`num_plans` at least the steps in flight plus one. Raises ImportError where FlashInfer cannot be imported."""

    def __init__(self, kernel: Kernel, device: torch.device | str, dtype: torch.dtype, *, num_plans: int = 4) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper
        self._kernel = kernel
        self._dtype = dtype
        self._num_plans = num_plans
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans: OrderedDict[tuple[Any, ...], tuple[Any, torch.cuda.Event]] = OrderedDict()

    def ragged(self, sequences: Sequences) -> Attend:
        lengths = tuple(sequences.cu_seqlens_host)

        def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
            out = q.new_empty(len(q), shape.num_heads, max(shape.head_dim, _MIN_HEAD_DIM))
            out[lengths[-1] :].zero_()
            return _run(self._planned(lengths, shape), q, k, v, out, lengths[-1])

        return attend

    def static(self, cu_seqlens: Tensor, num_tokens: int, shape: AttentionShape) -> "FlashInferStatic":
        num_seqs = len(cu_seqlens) - 1
        wrapper = self._wrapper(
            self._workspace, "NHD", backend=self._kernel, use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(num_seqs + 1, dtype=torch.int32, device=cu_seqlens.device),
            kv_indptr_buf=torch.zeros(num_seqs + 1, dtype=torch.int32, device=cu_seqlens.device),
        )  # fmt: skip
        return FlashInferStatic(wrapper, num_seqs, num_tokens, shape, self._dtype, self._num_plans)

    def _planned(self, lengths: tuple[int, ...], shape: AttentionShape) -> Any:
        """The wrapper planned for these lengths; the least recently used plan is replaced."""
        key = (lengths, shape)
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key][0]
        if len(self._plans) < self._num_plans:
            wrapper = self._wrapper(self._workspace, "NHD", backend=self._kernel)
        else:
            _, (wrapper, copied) = self._plans.popitem(last=False)
            copied.synchronize()  # long done: the plan was made `num_plans` plans ago
        _plan(wrapper, torch.tensor(lengths, dtype=torch.int32), shape, self._dtype)
        event = torch.cuda.Event()
        event.record()
        self._plans[key] = (wrapper, event)
        return wrapper


class FlashInferStatic:
    """Plans for one graph key. The first plan, of one sequence with all tokens, fixes the launch that is captured."""

    def __init__(
        self, wrapper: Any, num_seqs: int, num_tokens: int, shape: AttentionShape, dtype: torch.dtype, num_plans: int
    ) -> None:
        self._wrapper, self._shape, self._dtype = wrapper, shape, dtype
        device = wrapper.device
        first = wrapper._pin_memory_int_workspace_buffer
        self._pinned = [first, *(torch.empty_like(first, pin_memory=True) for _ in range(num_plans - 1))]
        self._offsets = [torch.zeros(num_seqs + 1, dtype=torch.int32, pin_memory=True) for _ in range(num_plans)]
        self._events = [torch.cuda.Event() for _ in range(num_plans)]
        self._next = 0
        self._last: list[int] = []
        self._out = torch.zeros(
            num_tokens, shape.num_heads, max(shape.head_dim, _MIN_HEAD_DIM), dtype=dtype, device=device
        )
        self.prepare([0] + [num_tokens] * num_seqs)

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        if cu_seqlens_host == self._last:
            return
        turn = self._next
        self._next = (turn + 1) % len(self._pinned)
        self._events[turn].synchronize()  # long done: as many plans ago as there are buffers
        self._wrapper._pin_memory_int_workspace_buffer = self._pinned[turn]
        offsets = self._offsets[turn]
        offsets.copy_(torch.tensor(cu_seqlens_host, dtype=torch.int32))
        _plan(self._wrapper, offsets, self._shape, self._dtype)
        self._events[turn].record()
        self._last = list(cu_seqlens_host)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        assert shape == self._shape, f"planned for {self._shape}, called with {shape}: one plan serves one shape"
        return _run(self._wrapper, q, k, v, self._out, self._last[-1])


def _plan(wrapper: Any, cu_seqlens: Tensor, shape: AttentionShape, dtype: torch.dtype) -> None:
    """Plans for int32 offsets on the host."""
    wrapper.plan(
        cu_seqlens, cu_seqlens, shape.num_heads, shape.num_kv_heads, max(shape.head_dim, _MIN_HEAD_DIM),
        causal=shape.causal, sm_scale=shape.scale, q_data_type=dtype,
    )  # fmt: skip


def _run(wrapper: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, num_tokens: int) -> Tensor:
    """Into `out` and returns it; FlashInfer refuses rows behind the `num_tokens` planned, so they are kept from it."""
    head_dim = q.shape[-1]
    q, k, v = q[:num_tokens], k[:num_tokens], v[:num_tokens]
    if head_dim >= _MIN_HEAD_DIM:
        wrapper.run(q, k, v, out=out[:num_tokens])
        return out
    q, k, v = (F.pad(x, (0, _MIN_HEAD_DIM - head_dim)) for x in (q, k, v))
    wrapper.run(q, k, v, out=out[:num_tokens])
    return out[..., :head_dim].contiguous()
