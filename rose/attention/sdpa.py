"""The reference backend: torch's scaled_dot_product_attention, one call a sequence. Runs anywhere."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.attention.interface import Attend, AttentionShape, Sequences


class SdpaBackend:
    """Keeps no state."""

    def ragged(self, sequences: Sequences) -> Attend:
        lengths = sequences.lengths

        def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
            if len(lengths) == 1:
                return _attend_one(q, k, v, shape)
            parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            return torch.cat([_attend_one(*part, shape) for part in parts])

        return attend


def _attend_one(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """One sequence of n tokens: [n, heads, head_dim] in and out."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        is_causal=shape.causal,
        scale=shape.scale,
        enable_gqa=shape.num_heads != shape.num_kv_heads,
    )
    return out[0].transpose(0, 1).contiguous()  # the CPU kernel already writes [n, heads, head_dim]
