"""What a draft head begins with, in one launch: embedding and hidden state, each by its norm, side by side."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl, row_warps


@triton.jit
def _side_by_side_kernel(
    left_ptr, right_ptr, left_weight_ptr, right_weight_ptr, out_ptr, size, eps,
    NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source, weight_ptr = left_ptr, left_weight_ptr
    if half == 1:
        source, weight_ptr = right_ptr, right_weight_ptr
    x = tl.load(source + row * size + column, mask=inside, other=0.0)
    if NORM:
        x = x.to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)) * weight
    tl.store(out_ptr + (row * 2 + half) * size + column, x.to(out_ptr.dtype.element_ty), mask=inside)


def side_by_side(left: Tensor, right: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float) -> Tensor:
    """left, right [T, H], contiguous -> [T, 2 H]; with `weights` [H] each by its RMSNorm."""
    assert left.is_contiguous(), "read as dense"
    assert right.is_contiguous(), "read as dense"
    num_rows, size = left.shape
    left_weight, right_weight = weights or (left, right)
    out, block = left.new_empty(num_rows, 2 * size), next_power_of_2(size)
    _side_by_side_kernel[(num_rows, 2)](
        left, right, left_weight, right_weight, out, size, eps,
        NORM=weights is not None, BLOCK=block, num_warps=row_warps(block), **pdl(left),
    )  # fmt: skip
    return out
