"""Attention over a paged cache in torch's own operators: the reference, and what runs on CPU.

Reads lengths on the host, so it waits for a device that is none. Rows of as many new tokens (a few) and about the same
length are one call, padded to the longest; a longer chunk of a prompt is a call of its own, and so is a lone new token,
whose keys are not copied where they lie side by side. What lies behind a row's last key, NaN for all that is known,
never meets another number: it is cut off, or overwritten after the gathering.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.attention.interface import Attend, AttentionShape
from rose.attention.paged import PagedKV, PagedRows

FEW_TOKENS = 8  # new ones, up to which rows are put together: decode and verify
Tokens = slice | Tensor


class ReferencePagedBackend:
    """Keeps no state. float32 results are as accurate as float32 allows."""

    def paged(self, rows: PagedRows, caches: Sequence[PagedKV]) -> Attend:
        return _Pass(rows, caches)


class _Chunk(NamedTuple):
    """One row of many new tokens."""

    tokens: slice
    blocks: Tensor  # int32, those it reads
    kv_length: int
    mask: Tensor | None  # bool [q, kv_length]; None: causal from the first key on

    def attend(self, q: Tensor, cache: PagedKV, shape: AttentionShape) -> Tensor:
        """q [n, num_heads, head_dim] -> the same."""
        k, v = (x.index_select(0, self.blocks).flatten(0, 1)[: self.kv_length].transpose(0, 1)[None] for x in cache)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k,
            v,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=shape.scale,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
        )
        return out[0].transpose(0, 1)


class _Group(NamedTuple):
    """n rows of q new tokens each, padded to L keys."""

    tokens: Tokens
    num_rows: int
    blocks: Tensor  # int32 [n * L / block_size]
    stale: Tensor  # int64: of the n * L gathered keys those that are none of their row's
    mask: Tensor  # float32 [n, 1, q, L]: 0 where a query sees a key, else -inf

    def attend(self, q: Tensor, cache: PagedKV, shape: AttentionShape) -> Tensor:
        """q [n * q, num_heads, head_dim] -> the same. Heads that share keys are further queries of one head."""
        n, num_kv_heads, head_dim = self.num_rows, shape.num_kv_heads, shape.head_dim
        num_shared = shape.num_heads // num_kv_heads
        k, v = (
            x.index_select(0, self.blocks)
            .view(-1, num_kv_heads, head_dim)
            .index_fill_(0, self.stale, 0)
            .view(n, -1, num_kv_heads, head_dim)
            .transpose(1, 2)
            for x in cache
        )
        q = q.reshape(n, -1, num_kv_heads, num_shared, head_dim).permute(0, 2, 3, 1, 4)
        mask = self.mask.to(q.dtype) if q.shape[3] == 1 else self.mask.to(q.dtype).repeat(1, 1, num_shared, 1)
        out = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, scale=shape.scale)
        return out.unflatten(2, q.shape[2:4]).permute(0, 3, 1, 2, 4).reshape(-1, shape.num_heads, head_dim)


class _Token(NamedTuple):
    """One new token of one row, which sees all of its keys."""

    tokens: slice
    blocks: slice | Tensor  # int32; a slice where they lie side by side, which copies nothing
    kv_length: int

    def attend(self, q: Tensor, cache: PagedKV, shape: AttentionShape) -> Tensor:
        """q [1, num_heads, head_dim] -> the same. Heads that share keys are queries of one head."""
        k, v = (
            (x[self.blocks] if isinstance(self.blocks, slice) else x.index_select(0, self.blocks))
            .view(-1, shape.num_kv_heads, shape.head_dim)[: self.kv_length]
            .transpose(0, 1)[None]
            for x in cache
        )
        q = q.reshape(1, shape.num_kv_heads, -1, shape.head_dim)
        return F.scaled_dot_product_attention(q, k, v, scale=shape.scale).reshape(1, -1, shape.head_dim)


class _Pass:
    """One forward pass; counts its calls to know the layer."""

    def __init__(self, rows: PagedRows, caches: Sequence[PagedKV]) -> None:
        self._caches = iter(caches)
        self._slot_mapping = rows.slot_mapping.long()
        self._parts: list[_Chunk | _Group | _Token] = []
        offsets, lengths = rows.cu_seqlens_q.tolist(), rows.kv_lengths.tolist()
        block_size = caches[0].block_size
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, kv_length in enumerate(lengths):
            q_length = offsets[row + 1] - offsets[row]
            if q_length > FEW_TOKENS:
                self._parts.append(_chunk(rows, row, offsets[row], q_length, kv_length, block_size))
            elif q_length:
                alike[q_length, (kv_length // block_size).bit_length()].append(row)
        self._parts += [_group(rows, each, offsets, lengths, block_size) for each in alike.values()]
        assert offsets[-1] == len(self._slot_mapping), "every token is some row's"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        cache = next(self._caches)
        cache.k.flatten(0, 1).index_copy_(0, self._slot_mapping, k)
        cache.v.flatten(0, 1).index_copy_(0, self._slot_mapping, v)
        if len(self._parts) == 1:  # all tokens, in their order
            return self._parts[0].attend(q, cache, shape)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            out[part.tokens] = part.attend(q[part.tokens], cache, shape)
        return out


def _chunk(rows: PagedRows, row: int, begin: int, q_length: int, kv_length: int, block_size: int) -> _Chunk:
    blocks = rows.block_table[row, : -(-kv_length // block_size)]
    mask = None
    if q_length < kv_length:
        keys = torch.arange(kv_length, device=blocks.device)
        mask = keys <= keys[kv_length - q_length :, None]
    return _Chunk(slice(begin, begin + q_length), blocks, kv_length, mask)


def _token(rows: PagedRows, row: int, begin: int, kv_length: int, block_size: int) -> _Token:
    blocks = rows.block_table[row, : -(-kv_length // block_size)]
    first, *others = blocks.tolist()
    side_by_side = slice(first, first + 1 + len(others))
    is_slice = others == list(range(side_by_side.start + 1, side_by_side.stop))
    return _Token(slice(begin, begin + 1), side_by_side if is_slice else blocks, kv_length)


def _group(
    rows: PagedRows, members: list[int], offsets: list[int], lengths: list[int], block_size: int
) -> _Group | _Token:
    device = rows.block_table.device
    first, last = members[0], members[-1]
    q_length = offsets[first + 1] - offsets[first]
    if (len(members), q_length) == (1, 1):
        return _token(rows, first, offsets[first], lengths[first], block_size)
    num_blocks = -(-max(lengths[row] for row in members) // block_size)
    tokens: Tokens = slice(offsets[first], offsets[last + 1])
    if offsets[last + 1] - offsets[first] != q_length * len(members):
        begins = torch.tensor([offsets[row] for row in members], device=device)
        tokens = (begins[:, None] + torch.arange(q_length, device=device)).flatten()
    keys = torch.arange(num_blocks * block_size, device=device)
    last_key = torch.tensor([lengths[row] for row in members], device=device) - 1
    last_visible = last_key[:, None] - torch.arange(q_length - 1, -1, -1, device=device)  # [n, q]
    mask = torch.zeros(len(members), 1, q_length, len(keys), device=device)
    return _Group(
        tokens=tokens,
        num_rows=len(members),
        blocks=rows.block_table[members, :num_blocks].flatten(),
        stale=(keys > last_key[:, None]).flatten().nonzero().squeeze(1),
        mask=mask.masked_fill_(keys > last_visible[:, None, :, None], float("-inf")),
    )
