"""Matrix products with what stands around them: a norm before, bias, activation and the residual addition after.

`FusedLinear` is several projections of the same input in one matrix: q, k, v or gate, up.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.layers.activation import activation
from rose.layers.norm import RMSNorm


class Linear(nn.Module):
    """y = act(norm(x) · weightᵀ + bias); x [T, in_features], y [T, out_features]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, act: str = "identity") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.act = act
        self._activation = None if act == "identity" else activation(act)

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """With `residual` [T, out_features]: adds y to it, in place."""
        y = F.linear(x if norm is None else norm(x), self.weight, self.bias)
        y = y if self._activation is None else self._activation(y)
        return y if residual is None else residual.add_(y)


class FusedLinear(Linear):
    """Projections of one input stacked along the output: weight [sum(sizes), in_features]."""

    def __init__(self, in_features: int, sizes: tuple[int, ...], *, bias: bool = True) -> None:
        super().__init__(in_features, sum(sizes), bias=bias)
        self.sizes = sizes

    def part(self, parameter: Tensor, index: int) -> Tensor:
        """The rows of `parameter` (weight or bias) that belong to projection `index`."""
        return parameter.narrow(0, sum(self.sizes[:index]), self.sizes[index])


class RowsLinear(Linear):
    """A few rows of a matrix too large to keep, such as the logits of two tokens: weight [len(rows), in_features]."""

    def __init__(self, in_features: int, rows: tuple[int, ...]) -> None:
        super().__init__(in_features, len(rows), bias=False)
        self.rows = rows
