"""The layers as fused kernels run them: same parameters, same interface, any dtype. `use_kernels` puts them in.

Model files stay as they are; what differs between devices is which of these classes stands in for which.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.attention.interface import Attend, AttentionShape
from rose.attention.paged import AppendsBefore
from rose.kernels.activation import gelu, silu_mul
from rose.kernels.embedding import embed, embed_layer_norm, embed_part
from rose.kernels.few_rows import MAX_ROWS, block_of, few_rows_product
from rose.kernels.norm import add_layer_norm, add_rms_norm
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.kernels.split_product import num_parts, split_product
from rose.layers.activation import activation
from rose.layers.embedding import Embedding, PositionedEmbeddings
from rose.layers.linear import ColumnLinear, FusedLinear, Linear, RowLinear, RowsLinear
from rose.layers.mlp import GatedMlp
from rose.layers.norm import LayerNorm, RMSNorm
from rose.layers.rotary import Rotary, Turn, split_heads


class PartialSums:
    """What a split product adds to the stream: still to be added, by the norm that reads the stream next.

    Goes through a model's layers in the stream's place.
    """

    def __init__(self, stream: Tensor, parts: Tensor) -> None:
        self.stream = stream
        self._parts: Tensor | None = parts

    def __len__(self) -> int:
        return len(self.stream)

    def norm(self, weight: Tensor, eps: float) -> Tensor:
        parts, self._parts = self._parts, None
        x, residual = (self.stream, None) if parts is None else (parts, self.stream)
        return add_rms_norm(x, residual, weight, eps)

    def added(self) -> Tensor:
        """The stream, complete."""
        parts, self._parts = self._parts, None
        return self.stream if parts is None else self.stream.add_(parts.sum(0))


Stream = Tensor | PartialSums


class KernelLinear(nn.Module):
    """Of few rows, norm and residual addition are the product's own. Of more, the addition is (beta = 1), or it is left
    to the next norm where a skinny product is split or summed over ranks; an exact GELU takes the bias with it."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._group = linear.group
        self._gelu = linear.act == "gelu"
        self._activation = None if linear.act in ("identity", "gelu") else activation(linear.act)
        self._plain = self.bias is None and linear.act == "identity"

    def forward(self, x: Stream, *, norm: nn.Module | None = None, residual: Stream | None = None) -> Stream:
        residual = residual.added() if isinstance(residual, PartialSums) else residual
        few = self._few_rows(x, norm)
        if self._group.size > 1:
            out = self._group.room((len(x), len(self.weight)), self.weight.dtype)
            y = self._group.all_reduce(few(out=out) if few else self._part(_normed(x, norm), out))
            return y if residual is None else PartialSums(residual, y[None])
        if few:
            return few(residual=residual)
        x = _normed(x, norm)
        if self._gelu:
            y = F.linear(x, self.weight)
            y = gelu(y, self.bias, out=y)
        elif residual is not None and self._plain:
            parts = num_parts(len(x), *self.weight.shape)
            if parts > 1:
                return PartialSums(residual, split_product(x, self.weight, parts))
            return residual.addmm_(x, self.weight.t())
        else:
            y = F.linear(x, self.weight, self.bias)
            y = y if self._activation is None else self._activation(y)
        return y if residual is None else residual.add_(y)

    def gated(self, x: Stream, norm: nn.Module) -> Tensor:
        """silu(gate) · up, gate and up being the two halves of what comes out."""
        few = self._few_rows(x, norm, gated=True)
        return few() if few else silu_mul(cast(Tensor, self(x, norm=norm)))

    def _few_rows(self, x: Stream, norm: nn.Module | None, *, gated: bool = False) -> Callable[..., Tensor] | None:
        """The product of few rows with its norm, which one kernel makes; None: this is not for it."""
        if len(x) > MAX_ROWS or not self._plain or self.weight.dtype == torch.float32:
            return None
        along = None
        if isinstance(norm, KernelRMSNorm) and isinstance(x, Tensor) and x.dtype == torch.bfloat16:
            along = (norm.weight, norm.eps)
        num_outputs, depth = self.weight.shape
        num_columns = num_outputs // 2 if gated else num_outputs
        block = block_of(len(x), num_columns, depth, gated=gated, norm=along is not None)
        if block is None:
            return None
        if along is None or block.tiled:
            x, along = _normed(x, norm), None
        return partial(few_rows_product, cast(Tensor, x), self.weight, norm=along, gated=gated, block=block)

    def _part(self, x: Tensor, out: Tensor | None) -> Tensor:
        """This rank's part of a sum over all, in `out` where the sum reads it."""
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


def _normed(x: Stream, norm: nn.Module | None) -> Tensor:
    if norm is not None:
        return cast(Tensor, norm(x))
    return x.added() if isinstance(x, PartialSums) else x


class KernelRMSNorm(nn.Module):
    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Stream) -> Tensor:
        return (
            x.norm(self.weight, self.eps)
            if isinstance(x, PartialSums)
            else add_rms_norm(x, None, self.weight, self.eps)
        )


class KernelLayerNorm(nn.Module):
    def __init__(self, norm: LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, out=x)


class KernelGatedMlp(nn.Module):
    def __init__(self, mlp: GatedMlp) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = KernelLinear(mlp.gate_up_proj), KernelLinear(mlp.down_proj)

    def forward(self, x: Stream, norm: nn.Module) -> Stream:
        return self.down_proj(self.gate_up_proj.gated(x, norm), residual=x)


class KernelEmbedding(nn.Module):
    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.weight, self._group = embedding.weight, embedding.group
        self._part = embedding.shard("weight", 0)

    def forward(self, indices: Tensor) -> Tensor:
        if self._group.size == 1:
            return embed(indices, self.weight)
        shape = (len(indices), self.weight.shape[1])
        out = self._group.room(shape, self.weight.dtype)
        out = self.weight.new_empty(shape) if out is None else out
        begin, end = self._part.begin, self._part.end
        return self._group.all_reduce(embed_part(indices, self.weight, begin=begin, num_words=end - begin, out=out))


class KernelPositionedEmbeddings(nn.Module):
    def __init__(self, embeddings: PositionedEmbeddings) -> None:
        super().__init__()
        self.word = embeddings.word_embeddings.weight
        self.position = embeddings.position_embeddings.weight
        self.token_type = embeddings.token_type_embeddings.weight
        self.weight, self.bias = embeddings.LayerNorm.weight, embeddings.LayerNorm.bias
        self._eps, self._position_offset = embeddings.LayerNorm.eps, embeddings.position_offset

    def forward(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        return embed_layer_norm(
            input_ids,
            positions,
            token_types if len(self.token_type) > 1 else None,
            word=self.word,
            position=self.position,
            token_type=self.token_type,
            weight=self.weight,
            bias=self.bias,
            eps=self._eps,
            position_offset=self._position_offset,
        )


class KernelRotary(nn.Module):
    """Norm, where a model has one, and rotation in one kernel, in place on the packed projections; the same kernel puts
    keys and values into a paged cache where attention lets it."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.cos, self.sin = rotary.cos, rotary.sin

    def forward(self, positions: Tensor) -> Turn:
        return partial(self._turn, positions)

    def _turn(
        self,
        positions: Tensor,
        qkv: Tensor,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        shape: AttentionShape,
        attend: Attend,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_weight, k_weight = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        eps = 0.0 if q_norm is None else q_norm.eps  # not read without a norm
        qk_norm_rope(
            qkv, q_weight, k_weight, positions, self.cos, self.sin,
            num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, eps=eps,
            append=attend.append_before() if isinstance(attend, AppendsBefore) else None,
        )  # fmt: skip
        return split_heads(qkv, shape)


KERNEL_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    Linear: KernelLinear,
    FusedLinear: KernelLinear,
    ColumnLinear: KernelLinear,
    RowLinear: KernelLinear,
    RowsLinear: KernelLinear,
    RMSNorm: KernelRMSNorm,
    LayerNorm: KernelLayerNorm,
    GatedMlp: KernelGatedMlp,
    Embedding: KernelEmbedding,
    PositionedEmbeddings: KernelPositionedEmbeddings,
    Rotary: KernelRotary,
}


def use_kernels(model: nn.Module) -> None:
    """Puts its kernel layer in the place of every layer of `model` that has one. The weights stay where they are."""
    for name, child in list(model.named_children()):
        replacement = KERNEL_LAYERS.get(type(child))
        if replacement is None:
            use_kernels(child)
        else:
            setattr(model, name, replacement(child))
