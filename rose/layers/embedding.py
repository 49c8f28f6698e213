"""Lookup tables: words, positions, token types."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.distributed.group import ALONE, Group
from rose.distributed.shard import Shard, shard, share
from rose.layers.norm import LayerNorm


class Embedding(nn.Module):
    """Rows of weight [num_embeddings / size, hidden_size] by index: each rank has its part of the vocabulary."""

    def __init__(self, num_embeddings: int, hidden_size: int, *, group: Group = ALONE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(share(num_embeddings, group), hidden_size))
        self.group = group
        self._shard = shard(0, num_embeddings, group)

    def forward(self, indices: Tensor) -> Tensor:
        """[T, hidden_size]; another rank's rows count as zeros, the sum has them all."""
        if self.group.size == 1:
            return F.embedding(indices, self.weight)
        local = indices - self._shard.begin
        outside = (local < 0) | (local >= self._shard.end - self._shard.begin)
        x = F.embedding(local.masked_fill_(outside, 0), self.weight)
        return self.group.all_reduce(x.masked_fill_(outside[:, None], 0.0))

    def shard(self, name: str, part: int) -> Shard:
        """See rose.layers.linear.Linear.shard."""
        return self._shard


class GatherLogits(nn.Module):
    """Logits of each rank's part of the vocabulary [N, vocab_size / size] -> float32 [N, vocab_size] of all."""

    def __init__(self, vocab_size: int, *, group: Group = ALONE) -> None:
        super().__init__()
        self._vocab_size, self._group = vocab_size, group

    def forward(self, logits: Tensor) -> Tensor:
        if self._group.size == 1:
            return logits.float()
        parts = self._group.all_gather(logits).transpose(0, 1)
        whole = parts.to(torch.float32, memory_format=torch.contiguous_format, copy=True)  # turned and widened at once
        return whole.flatten(1)[:, : self._vocab_size].contiguous()


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
