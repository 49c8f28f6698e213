"""Normalisation, together with the residual addition that comes before it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """Post-norm: LayerNorm(x + residual). `x` is overwritten."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self._shape = (hidden_size,)
        self._eps = eps

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.layer_norm(x.add_(residual), self._shape, self.weight, self.bias, self._eps)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, statistics in float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self._shape = (hidden_size,)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Pre-norm: (norm(x + residual), x + residual). `residual` is overwritten; None counts as zeros."""
        total = x if residual is None else residual.add_(x)
        return self(total), total
