"""Normalisation, after a block (LayerNorm, with the residual addition) or before one (RMSNorm)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """Post-norm: LayerNorm(x + residual). `x` is overwritten."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.layer_norm(x.add_(residual), self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, statistics in float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
