"""Rotary position embedding (RoFormer), in the half-split form of Hugging Face's Llama and Qwen files."""

import math
from functools import partial
from typing import Literal, Protocol

import torch
from msgspec import Struct
from torch import Tensor, nn

from rose.attention.interface import Attend, AttentionShape
from rose.layers.norm import RMSNorm


class RopeScaling(Struct, frozen=True, kw_only=True):
    """How a model's context was stretched after training. Field names are Hugging Face's.

    linear: every frequency is divided by `factor` (position interpolation). llama3: only those that turn fewer than
    `low_freq_factor` times within the original context; from `high_freq_factor` turns on they stay as they are, and
    between the two the division fades out (Llama 3.1).
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class Turn(Protocol):
    """What every layer of one step does to its heads; positions are the step's."""

    def __call__(
        self, qkv: Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None, shape: AttentionShape, attend: Attend
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (num_heads + 2 num_kv_heads) * head_dim] -> q, k, v [T, heads, head_dim]; heads of q and k are
        normalised, where there are norms, then turned by their token's position. `qkv` may be overwritten.
        `attend` is called with them next: its cache may be written on the way (rose.attention.paged.AppendsBefore)."""


class Rotary(nn.Module):
    """cos and sin of every position and frequency, float32 [max_position_embeddings, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, head_dim: int, max_position_embeddings: int, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if scaling is not None:
            frequencies = _scaled(frequencies, scaling)
        angles = torch.outer(torch.arange(max_position_embeddings, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor) -> Turn:
        """positions [T]: looked up once, the same for every layer of a pass."""
        return partial(_turn, self.cos[positions][:, None], self.sin[positions][:, None])


def split_heads(qkv: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the packed projections: q, k, v [T, heads, head_dim]."""
    heads = qkv.unflatten(-1, (-1, shape.head_dim))
    q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    return q, k, v


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Radians per token after stretching, float32 as given."""
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)


def _turn(
    cos: Tensor,
    sin: Tensor,
    qkv: Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    shape: AttentionShape,
    attend: Attend,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_heads(qkv, shape)
    if q_norm is not None and k_norm is not None:
        return rotate(q_norm(q), cos, sin), rotate(k_norm(k), cos, sin), v
    both = qkv.unflatten(-1, (-1, shape.head_dim))[:, : shape.num_heads + shape.num_kv_heads]
    q, k = rotate(both, cos, sin).split((shape.num_heads, shape.num_kv_heads), dim=1)
    return q, k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] turned by its position's angles, cos and sin [T, 1, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
