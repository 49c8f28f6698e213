"""The reference backend: torch's scaled_dot_product_attention. Runs anywhere.

Sequences of one length are one call, others a call each. On CPU that measured faster than padding with a mask at every
length tried, and than explicit matrix products; torch's nested tensors have no CPU kernel for it.
"""

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.attention.interface import Attend, AttentionShape, Sequences


class SdpaBackend:
    """Keeps no state."""

    def ragged(self, sequences: Sequences) -> Attend:
        lengths = sequences.lengths
        return _attend_equal(len(lengths)) if len(set(lengths)) == 1 else _attend_each(lengths)

    def static(self, cu_seqlens: Tensor, num_tokens: int, shape: AttentionShape) -> "SdpaStatic":
        return SdpaStatic()


class SdpaStatic:
    """For padded steps. Lengths are numbers of the launch: runs on static buffers, but must not be captured."""

    def __init__(self) -> None:
        self._lengths: list[int] = []

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        self._lengths = [end - start for start, end in pairwise(cu_seqlens_host) if end > start]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        num_tokens = sum(self._lengths)
        out = q.new_zeros(q.shape)
        out[:num_tokens] = _attend_each(self._lengths)(q[:num_tokens], k[:num_tokens], v[:num_tokens], shape)
        return out


def _attend_equal(num_sequences: int) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        q, k, v = (x.unflatten(0, (num_sequences, -1)).transpose(1, 2) for x in (q, k, v))
        return _sdpa(shape)(q, k, v).transpose(1, 2).flatten(0, 1)

    return attend


def _attend_each(lengths: list[int]) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        sdpa = _sdpa(shape)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, head_dim]
        parts = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
        return torch.cat([sdpa(*part).transpose(1, 2) for part in parts], dim=1)[0]

    return attend


def _sdpa(shape: AttentionShape) -> partial[Tensor]:
    """[N, heads, n, head_dim] in and out."""
    grouped = shape.num_heads != shape.num_kv_heads
    return partial(F.scaled_dot_product_attention, is_causal=shape.causal, scale=shape.scale, enable_gqa=grouped)
