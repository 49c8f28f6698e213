"""A matrix product of few rows in one kernel with what stands around it: the norm before, SwiGLU or the addition after.

At few rows a product is the reading of its weight, and what costs besides is the kernels between two products. One or
two rows are multiplied value by value, with the norm taken along: its scale, a number a row, multiplies the result.
More are the narrow side of a tensor core's tile. Programs read whole rows of the weight and ask for the first of them
before the kernel in front has ended (rose.kernels.launch). A row's result does not depend on the others' values, and in
tiles not on how many there are.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.activation import swiglu
from rose.kernels.launch import next_power_of_2, pdl, stages_that_fit

MAX_ROWS = 32
_LINE = tl.constexpr(64)  # values of 128 bytes
_WIDE, _WIDE_OF_MANY = 8192, 5120  # columns for which there are enough programs of 64, for up to 16 rows and for more
_NARROW = 4096  # columns of a product of several rows below which the library's are faster
_AT_ONCE = 264  # programs that are all there at once, two on each multiprocessor
_MOST_VALUES = 1 << 17  # of x, which every program reads: with more, programs of 16 columns are slower


class Block(NamedTuple):
    """How a program works: columns of the result, depth of a tile, warps, tiles on their way, tiles asked for early."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int
    early: int
    tiled: bool = False  # on tensor cores


@triton.jit
def _ask_for(weight_row, depth, BLOCK_K: tl.constexpr, EARLY: tl.constexpr):
    """Starts bringing the first tiles of these rows into the L2."""
    line = tl.arange(0, BLOCK_K // _LINE) * _LINE
    for tile in tl.static_range(EARLY):
        if tile * BLOCK_K < depth:
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
                [(weight_row + tl.minimum(tile * BLOCK_K + line, depth - _LINE)[None, :]).to(tl.int64)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def _begin(weight_row, up, depth, GATED: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr):
    """Waits for the kernel in front, its own first reads on their way. `up`: from a gate's row to its partner."""
    _ask_for(weight_row, depth, BLOCK_K, EARLY)
    if GATED:
        _ask_for(weight_row + up, depth, BLOCK_K, EARLY)
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def _rounded_swiglu(gate, up, dtype: tl.constexpr):
    """Of sums in float32, rounded as if they had been put out."""
    return swiglu(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32))


@triton.jit
def _put(out_ptr, residual_ptr, place, total, mask, ADD: tl.constexpr):
    if ADD:
        total += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tiled_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, num_rows, num_columns, depth, x_stride,
    GATED: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k, row = tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    weight_row = weight_ptr + column[:, None].to(tl.int64) * depth
    up = num_columns.to(tl.int64) * depth
    if PDL:
        _begin(weight_row, up, depth, GATED, BLOCK_K, EARLY)
    total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    other = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    inside = row < num_rows
    for begin in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        weight = tl.load(weight_row + begin + k[None, :])
        x = tl.trans(tl.load(x_ptr + row[:, None] * x_stride + begin + k[None, :], mask=inside[:, None], other=0.0))
        total = tl.dot(weight, x, total, input_precision="ieee")
        if GATED:
            partner = tl.load(weight_row + up + begin + k[None, :])
            other = tl.dot(partner, x, other, input_precision="ieee")
    if GATED:
        total = _rounded_swiglu(total, other, out_ptr.dtype.element_ty)
    place = row[None, :].to(tl.int64) * num_columns + column[:, None]
    _put(out_ptr, residual_ptr, place, total, inside[None, :], ADD)


@triton.jit
def _value_by_value_kernel(
    x_ptr, weight_ptr, norm_ptr, residual_ptr, out_ptr, num_columns, depth, x_stride, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + column[:, None].to(tl.int64) * depth
    up = num_columns.to(tl.int64) * depth
    if PDL:
        _begin(weight_row, up, depth, GATED, BLOCK_K, EARLY)
    totals, squares = (), ()  # added up at the end, not in the loop
    for _ in tl.static_range(ROWS * PARTS):
        totals += (tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32),)
    for _ in tl.static_range(ROWS):
        squares += (tl.zeros((BLOCK_K,), dtype=tl.float32),)
    for begin in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        inside = begin + k < depth
        xs, new_totals, new_squares = (), (), ()
        for row in tl.static_range(ROWS):
            x = tl.load(x_ptr + row * x_stride + begin + k, mask=inside, other=0.0).to(tl.float32)
            new_squares += (squares[row] + x * x,)
            if NORM:
                x *= tl.load(norm_ptr + begin + k, mask=inside, other=0.0).to(tl.float32)
            xs += (x,)
        for part in tl.static_range(PARTS):
            tile = weight_row + part * up + begin + k[None, :]
            weight = tl.load(tile, mask=inside[None, :], other=0.0).to(tl.float32)
            for row in tl.static_range(ROWS):
                new_totals += (totals[part * ROWS + row] + weight * xs[row][None, :],)
        totals, squares = new_totals, new_squares
    for row in tl.static_range(ROWS):
        scale = 1.0
        if NORM:
            scale = 1.0 / tl.sqrt(tl.sum(squares[row], axis=0) / depth + eps)
        total = tl.sum(totals[row], axis=1) * scale
        if GATED:
            total = _rounded_swiglu(total, tl.sum(totals[ROWS + row], axis=1) * scale, out_ptr.dtype.element_ty)
        _put(out_ptr, residual_ptr, row * num_columns + column, total, column < num_columns, ADD)


def few_rows_product(
    x: Tensor,
    weight: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    block: Block,
) -> Tensor:
    """norm(x) · weightᵀ [M, N], `gated` silu(gate) · up [M, N / 2]; with `residual` added to it, in place.

    x [M, K], rows may be strided; weight [N, K] contiguous, gated: gate's rows first; norm: RMSNorm's weight [K] and
    eps, not for tiled blocks; residual, out [M, N] contiguous. All of one dtype; with a norm not float16, which x times
    its weight may leave. `block`: one for the shape (`block_of`).
    """
    num_rows, depth = x.shape
    num_columns = len(weight) // 2 if gated else len(weight)
    assert weight.is_contiguous(), "read as dense"
    if out is None:
        out = x.new_empty(num_rows, num_columns) if residual is None else residual
    padded_rows = max(16, next_power_of_2(num_rows)) if block.tiled else num_rows
    grid, sizes = (num_columns // block.columns,), (num_columns, depth, x.stride(0))
    stage_bytes = block.depth * (block.columns * (2 if gated else 1) + padded_rows) * x.element_size()
    options = {
        "GATED": gated, "ADD": residual is not None, "ROWS": padded_rows, "BLOCK_N": block.columns,
        "BLOCK_K": block.depth, "STAGES": stages_that_fit(block.num_stages, stage_bytes, x), "EARLY": block.early,
        "num_warps": block.num_warps, **pdl(x),
    }  # fmt: skip
    if block.tiled:
        assert norm is None, "tiles read x as it is"
        _tiled_kernel[grid](x, weight, residual, out, num_rows, *sizes, **options)
    else:
        norm_weight, eps = (None, 0.0) if norm is None else norm
        _value_by_value_kernel[grid](
            x, weight, norm_weight, residual, out, *sizes, eps, NORM=norm is not None, **options
        )
    return out


def block_of(num_rows: int, num_columns: int, depth: int, *, gated: bool = False, norm: bool = False) -> Block | None:
    """As measured (bench/micro/few_rows.py; of 4096 columns within layers, decode_layer.py); None: the library's
    product is better. `norm`: one could be taken along, which only a block that is not tiled does."""
    if num_rows > MAX_ROWS or num_columns % 16 or depth % 64:
        return None
    is_wide = num_columns >= (_WIDE if num_rows <= 16 else _WIDE_OF_MANY) and num_columns % 64 == 0 and depth % 128 == 0
    if num_rows == 1 and gated:
        return Block(4, 1024, 4, 3, 0)
    if num_rows <= 2 and not gated and (norm or not is_wide):
        if num_rows == 2:
            return Block(4, 256, 1, 5, 4) if norm else Block(4, 512, 2, 4, 2)
        return Block(8, 1024, 4, 3, 2) if depth >= 4096 else Block(4, 256, 1, 5, 4)
    if is_wide:
        return Block(64, 128, 4, 4, 2, tiled=True)
    if num_columns < _NARROW or num_rows > 16:
        return None
    at_once = num_columns // 16 <= _AT_ONCE
    if num_rows * depth > (2 * _MOST_VALUES if at_once else _MOST_VALUES):
        return None
    tile = next(tile for tile in (512, 256, 128, 64) if depth % tile == 0)
    return Block(16, tile, 2, 4 if at_once else 3, 2, tiled=True)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ [M, N], by whatever is fastest for as many rows; x [M, K], weight [N, K] contiguous, of one dtype."""
    block = None if x.dtype == torch.float32 else block_of(len(x), *weight.shape)
    return F.linear(x, weight) if block is None else few_rows_product(x, weight, block=block)
