"""Lookup tables: words, positions, token types."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """Rows of weight [num_embeddings, hidden_size] by index."""

    def __init__(self, num_embeddings: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, hidden_size))

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)
