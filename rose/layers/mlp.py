"""The gated feed-forward half of a layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from rose.distributed.group import ALONE, Group
from rose.layers.linear import FusedLinear, RowLinear
from rose.layers.norm import RMSNorm


class SiluMul(nn.Module):
    """gate, up side by side [T, 2 I] -> silu(gate) * up [T, I]."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class GatedMlp(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x))), gate and up in one matrix. `x` is overwritten."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False, group: Group = ALONE) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(hidden_size, 2 * (intermediate_size,), bias=bias, group=group)
        self.act = SiluMul()
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias=bias, group=group)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x, norm=norm)), residual=x)
