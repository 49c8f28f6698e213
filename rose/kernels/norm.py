"""Residual addition with RMSNorm or LayerNorm in one pass over a row, one program a token.

Statistics and sums are float32. The normalised value is computed from the unrounded sum; the stream keeps the sum
in its own dtype. Padding rows are rows like all others. RMSNorm also takes a product as partial sums over its depth
(`rose.kernels.split_product`) and adds them on the way.
"""

import triton
import triton.language as tl
from torch import Tensor, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl, row_warps


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, bias_ptr, weight_ptr, out_ptr, x_stride, part_stride, hidden_size, eps,
    PARTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden_size
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_at = x_ptr + row * x_stride + column
    total = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x_at + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = residual_ptr + row * hidden_size + column
        total += tl.load(stream, mask=mask, other=0.0).to(tl.float32)
        tl.store(stream, total.to(residual_ptr.dtype.element_ty), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / hidden_size + eps)
    tl.store(out_ptr + row * hidden_size + column, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_layer_norm_kernel(
    x_ptr, residual_ptr, x_bias_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, hidden_size, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden_size
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(x_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row * hidden_size + column, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, total - tl.sum(total, axis=0) / hidden_size, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / hidden_size + eps)
    out = centred * scale * weight + bias
    tl.store(out_ptr + row * hidden_size + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """residual += x (+ bias) in place; returns rms_norm(residual) * weight.

    x [T, H], rows may be strided, or partial sums [P, T, H] to be added first, in their order; residual, out [T, H]
    contiguous; weight, bias [H]. Without a residual only the norm. `bias` is that of the matrix product that made x.
    `out` may be x (contiguous).
    """
    parts = x if x.dim() == 3 else x[None]
    num_parts, num_tokens, hidden_size = parts.shape
    out = empty_like(parts[0]) if out is None else out
    block = next_power_of_2(hidden_size)
    _add_rms_norm_kernel[(num_tokens,)](
        x, residual, bias, weight, out, parts.stride(1), parts.stride(0), hidden_size, eps,
        PARTS=num_parts, HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None, BLOCK=block,
        num_warps=row_warps(block), **pdl(x),
    )  # fmt: skip
    return out


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    x_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """layer_norm(x (+ x_bias) (+ residual)) * weight + bias.

    x [T, H], rows may be strided; residual, out [T, H] contiguous; weight, bias, x_bias [H]. `x_bias` is that of the
    matrix product that made x. `out` may be x (contiguous) or residual.
    """
    num_tokens, hidden_size = x.shape
    out = empty_like(x) if out is None else out
    block = next_power_of_2(hidden_size)
    _add_layer_norm_kernel[(num_tokens,)](
        x, residual, x_bias, weight, bias, out, x.stride(0), hidden_size, eps,
        HAS_RESIDUAL=residual is not None, HAS_BIAS=x_bias is not None, BLOCK=block, num_warps=row_warps(block),
        **pdl(x),
    )  # fmt: skip
    return out
