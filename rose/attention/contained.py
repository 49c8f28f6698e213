"""Backends whose kernels read past a sequence's end (rose.attention.choice.SPREADING), made safe for many sequences.

What reaches such a kernel has no values that are not finite where it could read another sequence's or old tokens'.
"""

from typing import Protocol

from torch import Tensor

from rose.attention.interface import Attend, AttentionBackend, AttentionShape, Sequences
from rose.attention.static import StaticAttention, StaticBackend
from rose.kernels.contain import contain


class BothWays(AttentionBackend, StaticBackend, Protocol):
    """For steps that run once, and for graphs."""


class ContainedBackend:
    """`backend` with `contain` before each call. Writes to k and v."""

    def __init__(self, backend: BothWays) -> None:
        self._backend = backend

    def ragged(self, sequences: Sequences) -> Attend:
        attend = self._backend.ragged(sequences)

        def contained(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
            contain(k, v, sequences.cu_seqlens)
            return attend(q, k, v, shape)

        return contained

    def static(self, cu_seqlens: Tensor, num_tokens: int, shape: AttentionShape) -> "ContainedAttention":
        return ContainedAttention(self._backend.static(cu_seqlens, num_tokens, shape), cu_seqlens)


class ContainedAttention:
    """Of one graph: `cu_seqlens` (int32 [N+1], on the device) is read when the kernel runs."""

    def __init__(self, attention: StaticAttention, cu_seqlens: Tensor) -> None:
        self._attention, self._cu_seqlens = attention, cu_seqlens

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        self._attention.prepare(cu_seqlens_host)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        contain(k, v, self._cu_seqlens)
        return self._attention(q, k, v, shape)
