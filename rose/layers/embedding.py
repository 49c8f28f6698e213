"""Lookup tables: words, positions, token types."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.layers.norm import LayerNorm


class Embedding(nn.Module):
    """Rows of weight [num_embeddings, hidden_size] by index."""

    def __init__(self, num_embeddings: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, hidden_size))

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)


class PositionedEmbeddings(nn.Module):
    """BERT's beginning: LayerNorm(word + position + type), [T, hidden_size]. Parameters carry BERT's names."""

    def __init__(
        self,
        *,
        vocab_size: int,
        num_positions: int,
        num_types: int,
        hidden_size: int,
        norm_eps: float,
        position_offset: int,
    ) -> None:
        super().__init__()
        self.word_embeddings = Embedding(vocab_size, hidden_size)
        self.position_embeddings = Embedding(num_positions, hidden_size)
        self.token_type_embeddings = Embedding(num_types, hidden_size)
        self.LayerNorm = LayerNorm(hidden_size, norm_eps)
        self.position_offset = position_offset

    def forward(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """Each int32 [T]; no types: all are 0."""
        x = self.word_embeddings(input_ids)
        if token_types is None or len(self.token_type_embeddings.weight) == 1:  # RoBERTa knows one type only
            x.add_(self.token_type_embeddings.weight[0])
        else:
            x.add_(self.token_type_embeddings(token_types))
        return self.LayerNorm(x, self.position_embeddings(positions + self.position_offset))
