"""Where attention is measured: shapes and lengths, their buffers, and the error of an output against float32."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bench.micro.gpu_timing import relative_error
from rose.attention.interface import AttentionShape

DEVICE, BF16 = "cuda", torch.bfloat16


class Point(NamedTuple):
    """N sequences of equal length."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    causal: bool
    num_seqs: int
    length: int

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5, self.causal)

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.length

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"d{self.head_dim} {self.num_heads}:{self.num_kv_heads} {mask} {self.num_seqs}x{self.length}"

    @property
    def flops(self) -> float:
        whole = 4.0 * self.num_seqs * self.length**2 * self.num_heads * self.head_dim
        return whole / 2 if self.causal else whole

    @property
    def num_bytes(self) -> float:
        return 2.0 * self.num_tokens * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)


LENGTHS = {
    32: ((1, 32), (1, 128), (1, 512), (32, 32), (256, 32), (32, 128), (25, 512)),
    64: ((1, 32), (1, 128), (1, 512), (1, 2048), (1, 8192), (32, 32), (5, 512), (25, 512)),
    128: ((1, 32), (1, 128), (1, 512), (1, 1024), (1, 4096), (1, 16384), (1, 32768), (8, 128), (32, 32), (5, 512),
          (25, 512), (8, 512), (16, 512), (50, 512), (100, 512), (1, 2048), (10, 4096)),
}  # fmt: skip


def points() -> Iterator[Point]:
    for causal in (False, True):
        yield from (Point(128, 16, 8, causal, *size) for size in LENGTHS[128])
    yield from (Point(64, 16, 16, False, *size) for size in LENGTHS[64])
    yield from (Point(32, 12, 12, False, *size) for size in LENGTHS[32])


class Buffers(NamedTuple):
    """q, k and v are views of one packed buffer, as a model's projection leaves them."""

    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    offsets: list[int]


def make_buffers(point: Point) -> Buffers:
    heads, kv, dim = point.num_heads, point.num_kv_heads, point.head_dim
    qkv = torch.randn(point.num_tokens, (heads + 2 * kv) * dim, device=DEVICE).to(BF16)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in qkv.split([heads * dim, kv * dim, kv * dim], dim=-1))
    offsets = list(range(0, point.num_tokens + 1, point.length))
    return Buffers(qkv, q, k, v, torch.tensor(offsets, dtype=torch.int32, device=DEVICE), offsets)


def sampled_error(out: Tensor, b: Buffers, offsets: list[int], shape: AttentionShape) -> float:
    """Against float32, up to 256 rows each of the first, middle and last sequences that are not empty."""
    pairs = [(s, e) for s, e in pairwise(offsets) if e > s]
    got, want = [], []
    for start, end in {pairs[0], pairs[len(pairs) // 2], pairs[-1]}:
        rows = torch.arange(start, end, max(1, (end - start) // 256), device=DEVICE)
        rows[-1] = end - 1
        q = b.q[rows].float().transpose(0, 1)
        group = shape.num_heads // shape.num_kv_heads
        k, v = (x[start:end].float().transpose(0, 1).repeat_interleave(group, 0) for x in (b.k, b.v))
        scores = q @ k.transpose(1, 2) * shape.scale
        if shape.causal:
            key = torch.arange(start, end, device=DEVICE)
            scores.masked_fill_(key[None, :] > rows[:, None], -math.inf)
        got.append(out[rows].flatten())
        want.append((scores.softmax(-1) @ v).transpose(0, 1).flatten())
    return relative_error(torch.cat(got), torch.cat(want))


def other_offsets(point: Point) -> list[int]:
    """Other lengths under the same key, empty sequences and padding rows among them."""
    generator = torch.Generator().manual_seed(7)
    used = point.num_tokens - point.num_tokens // 5
    cuts = sorted(torch.randint(0, used + 1, (point.num_seqs - 1,), generator=generator).tolist())
    return [0, *cuts, used]


def views(qkv: Tensor, point: Point) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, kv, dim = point.num_heads, point.num_kv_heads, point.head_dim
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in qkv.split([heads * dim, kv * dim, kv * dim], dim=-1))
    return qkv, q, k, v
