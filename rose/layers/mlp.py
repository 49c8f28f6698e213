"""The gated feed-forward half of a layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from rose.layers.linear import FusedLinear, Linear


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(hidden_size, 2 * (intermediate_size,), bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))
