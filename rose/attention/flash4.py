"""FlashAttention 4 (package flash-attn-4), compiled at first use. Lengths are read on the device: nothing to plan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rose.attention.interface import Attend, AttentionShape, Sequences


class Flash4Backend:
    """Keeps no state. Raises ImportError where flash-attn-4 cannot be imported."""

    def __init__(self) -> None:
        from flash_attn.cute import flash_attn_varlen_func

        self._function: Callable[..., Any] = flash_attn_varlen_func

    def ragged(self, sequences: Sequences) -> Attend:
        return Flash4Attention(self._function, sequences.cu_seqlens, max(sequences.lengths))

    def static(self, cu_seqlens: Tensor, num_tokens: int, shape: AttentionShape) -> "Flash4Attention":
        return Flash4Attention(self._function, cu_seqlens, num_tokens)


class Flash4Attention:
    """`max_length` bounds every sequence; it sizes the grid only. Rows that no sequence owns are zero."""

    def __init__(self, function: Callable[..., Any], cu_seqlens: Tensor, max_length: int) -> None:
        self._function = function
        self._cu_seqlens = cu_seqlens
        self._max_length = max_length

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        """Nothing to do: the kernel reads the device's offsets."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        out = self._function(
            q, k, v, cu_seqlens_q=self._cu_seqlens, cu_seqlens_k=self._cu_seqlens,
            max_seqlen_q=self._max_length, max_seqlen_k=self._max_length,
            softmax_scale=shape.scale, causal=shape.causal,
        )  # fmt: skip
        out = out[0] if isinstance(out, tuple) else out
        # rows behind the last sequence are left unwritten by the library
        behind = torch.arange(len(out), device=out.device) >= self._cu_seqlens[-1]
        return out.masked_fill_(behind[:, None, None], 0)
