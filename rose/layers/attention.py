"""The attention layer as models see it: heads in, heads out. How it is computed is the step's `Attend`."""

from torch import Tensor, nn

from rose.attention.interface import Attend, AttentionShape
from rose.distributed.group import ALONE, Group
from rose.distributed.shard import share


class Attention(nn.Module):
    """Splits packed projections into heads and attends. Counts are of all ranks; here each has its own heads.

    q [T, num_heads * head_dim], k and v [T, num_kv_heads * head_dim] -> [T, num_heads * head_dim]
    """

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool, group: Group = ALONE) -> None:
        super().__init__()
        self.shape = AttentionShape(
            share(num_heads, group), share(num_kv_heads, group), head_dim, head_dim**-0.5, causal
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        shape = self.shape
        return attend(
            q.view(-1, shape.num_heads, shape.head_dim),
            k.view(-1, shape.num_kv_heads, shape.head_dim),
            v.view(-1, shape.num_kv_heads, shape.head_dim),
            shape,
        ).reshape(-1, shape.num_heads * shape.head_dim)
