"""The gated feed-forward half of a layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from rose.distributed.group import ALONE, Group
from rose.layers.linear import FusedLinear, RowLinear
from rose.layers.norm import RMSNorm


class GatedMlp(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x))), gate and up in one matrix. `x` is overwritten."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False, group: Group = ALONE) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(hidden_size, 2 * (intermediate_size,), bias=bias, group=group)
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias=bias, group=group)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        gate, up = self.gate_up_proj(x, norm=norm).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up), residual=x)
