"""Rotary position embedding (RoFormer), in the half-split form of Hugging Face's Llama and Qwen files."""

import torch
from torch import Tensor, nn


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

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> (cos, sin), each [T, 1, head_dim / 2], the same for every layer of a pass."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] turned by its position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
