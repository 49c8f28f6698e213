"""Rotary position embedding (RoFormer), in the half-split form of Hugging Face's Llama and Qwen files."""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from rose.attention.interface import AttentionShape
from rose.layers.norm import RMSNorm


class Turn(Protocol):
    """What every layer of one step does to its heads; positions are the step's."""

    def __call__(
        self, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, shape: AttentionShape
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (num_heads + 2 num_kv_heads) * head_dim] -> q, k, v [T, heads, head_dim]; heads of q and k are
        normalised, then turned by their token's position. `qkv` may be overwritten."""


class Rotary(nn.Module):
    """cos and sin of every position and frequency, float32 [max_position_embeddings, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_position_embeddings: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
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


def _turn(
    cos: Tensor, sin: Tensor, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, shape: AttentionShape
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_heads(qkv, shape)
    return rotate(q_norm(q), cos, sin), rotate(k_norm(k), cos, sin), v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] turned by its position's angles, cos and sin [T, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
