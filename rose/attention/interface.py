"""What models and runners ask of an attention backend.

A backend prepares one step (`ragged` for encoders) and returns an `Attend`, which every layer of that step's forward
pass calls. So model files know nothing of batches, caches or kernels.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

from torch import Tensor


class AttentionShape(NamedTuple):
    """What is the same for every call of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    causal: bool


class Sequences(NamedTuple):
    """Where packed sequences begin and end, on the host and on the device."""

    cu_seqlens_host: list[int]  # N + 1 offsets, the first is 0
    cu_seqlens: Tensor  # the same, int32 [N + 1]

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in pairwise(self.cu_seqlens_host)]


class Attend(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        """q [T, num_heads, head_dim], k, v [T, num_kv_heads, head_dim] -> [T, num_heads, head_dim]."""


class AttentionBackend(Protocol):
    def ragged(self, sequences: Sequences) -> Attend:
        """Attention within each of the packed sequences, nothing cached."""
