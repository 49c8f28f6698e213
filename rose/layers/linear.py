"""Matrix products with what stands around them: a norm before, bias, activation and the residual addition after.

`FusedLinear` is several projections of the same input in one matrix: q, k, v or gate, up. In a group of ranks column
layers (`FusedLinear`, `ColumnLinear`) have this rank's outputs, and a `RowLinear` behind them adds up what all ranks
made of theirs (Megatron-LM, Shoeybi et al. 2019).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.distributed.group import ALONE, Group
from rose.distributed.shard import Shard, shard, share
from rose.layers.activation import activation
from rose.layers.norm import RMSNorm


class Linear(nn.Module):
    """y = act(norm(x) · weightᵀ + bias); x [T, in_features], y [T, out_features]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, act: str = "identity") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.group: Group = ALONE  # over which products are summed
        self.act = act
        self._activation = None if act == "identity" else activation(act)

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """With `residual` [T, out_features]: adds y to it, in place."""
        y = self.group.all_reduce(F.linear(x if norm is None else norm(x), self.weight, self.bias))
        y = y if self._activation is None else self._activation(y)
        return y if residual is None else residual.add_(y)

    def shard(self, name: str, part: int) -> Shard | None:
        """What this rank has of the file's tensor for parameter `name`, or for a part of it; None: all."""
        return None


class ColumnLinear(Linear):
    """This rank's outputs of a matrix: weight [out_features / size, in_features]. Where the ranks do not divide
    out_features, the last has rows of zeros."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, act: str = "identity", group: Group = ALONE
    ) -> None:
        super().__init__(in_features, share(out_features, group), bias=bias, act=act)
        self._shard = shard(0, out_features, group)

    def shard(self, name: str, part: int) -> Shard:
        return self._shard


class RowLinear(Linear):
    """A product over this rank's inputs, summed over all ranks: weight [out_features, in_features / size]. The bias is
    the leader's, the others' is zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, group: Group = ALONE) -> None:
        super().__init__(share(in_features, group), out_features, bias=bias)
        self.group = group
        self._shards = {
            "weight": shard(1, in_features, group),
            "bias": Shard(0, out_features, 0, out_features if group.leads else 0),
        }

    def shard(self, name: str, part: int) -> Shard:
        return self._shards[name]


class FusedLinear(Linear):
    """Projections of one input stacked along the output, of each this rank's rows: weight [sum(sizes), in_features]."""

    def __init__(self, in_features: int, sizes: tuple[int, ...], *, bias: bool = True, group: Group = ALONE) -> None:
        local = tuple(share(size, group) for size in sizes)
        super().__init__(in_features, sum(local), bias=bias)
        self.sizes = local
        self._shards = [shard(0, size, group) for size in sizes]

    def shard(self, name: str, part: int) -> Shard:
        return self._shards[part]

    def part(self, parameter: Tensor, index: int) -> Tensor:
        """The rows of `parameter` (weight or bias) that belong to projection `index`."""
        return parameter.narrow(0, sum(self.sizes[:index]), self.sizes[index])


class RowsLinear(Linear):
    """A few rows of a matrix too large to keep, such as the logits of two tokens: weight [len(rows), in_features]."""

    def __init__(self, in_features: int, rows: tuple[int, ...]) -> None:
        super().__init__(in_features, len(rows), bias=False)
        self.rows = rows
