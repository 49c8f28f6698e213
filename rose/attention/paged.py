"""Attention over a paged cache of keys and values: what runners give a backend, and what every layer calls.

Whatever a backend reads to find its keys lies on the device; of lengths the host knows upper bounds only. Knows neither
sequence slots nor plans.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from rose.attention.interface import Attend


class PagedKV(NamedTuple):
    """The cache of one layer: [num_blocks + 1, block_size, num_kv_heads, head_dim] each; the last block is the dummy,
    which takes what is written past a block table and is read by rows that nobody asks for."""

    k: Tensor
    v: Tensor

    @property
    def block_size(self) -> int:
        return self.k.shape[1]


class PagedRows(NamedTuple):
    """R rows of a step with T new tokens in all, on the device but for the last two."""

    cu_seqlens_q: Tensor  # int32 [R + 1]: where the new tokens of each row begin and end
    kv_lengths: Tensor  # int32 [R]: computed tokens after this step, the new ones included
    block_table: Tensor  # int32 [R, max_blocks]: unused entries name the dummy block
    slot_mapping: Tensor  # int32 [T]: block * block_size + offset that each token's key and value go to
    max_q_len: int  # upper bounds, known on the host
    max_kv_len: int


class Append(NamedTuple):
    """Where new keys and values go; as `kv_append`'s arguments."""

    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor

    @property
    def dummy(self) -> int:
        """The first place of the dummy block."""
        return (len(self.k_cache) - 1) * self.k_cache.shape[1]


@runtime_checkable
class AppendsBefore(Protocol):
    """An `Attend` whose next call can find its keys and values in their places already."""

    def append_before(self) -> Append:
        """Where those of the next call go. Who asks writes them there before the call, which does not then."""


class PagedBackend(Protocol):
    def paged(self, rows: PagedRows, caches: Sequence[PagedKV]) -> Attend:
        """One forward pass: its n-th call is layer n's.

        A call writes the layer's keys and values to `caches[n]`, then attends causally: query i of a row with q new
        tokens sees the first `kv_lengths - q + i + 1` keys of its block table.
        """
