"""Matrix products of few rows (a short query) with what stands around them: y = epilogue(norm(x) · weightᵀ).

At M <= 512 such a product is bound by reading the weight and by latency, not by arithmetic. So
- RMSNorm is folded in: rows are scaled by 1/rms after the product (fold the norm's weight into the matrix:
  `fold_norm`); SwiGLU and the residual addition are epilogues. A layer needs four products and attention, no more;
- every program asks for its slab of the weight, into L2, before it waits for the kernel in front of it (PDL);
- K can be split over programs: partial sums go through L2 and the last program of a tile adds them, always in the
  same order, so that results are bit-identical from run to run.
"""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import pdl

Epilogue = Literal["none", "silu_mul", "residual"]
_PREFETCH_BYTES = 128  # a line of L2


class Tiles(NamedTuple):
    """A launch: rows and columns of a tile, depth of a step, programs along K, warps, pipeline depth."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


class Workspace:
    """Partial sums and arrival counters of split products; one per stream, shared by all products on it."""

    def __init__(self, device: torch.device | str, num_floats: int = 16 << 20, num_tiles: int = 4096) -> None:
        self.partial = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(num_tiles, dtype=torch.int32, device=device)


@triton.jit
def _prefetch_l2(address):
    """Asks for the lines at `address` (a tensor of pointers) without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _product(
    x_ptr, weight_ptr, row, column, step, x_stride, k_begin, k_end, num_rows,
    NORM: tl.constexpr, GATED: tl.constexpr, gate_rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(x · weightᵀ, the same with the second half of the weight if gated, sum of squares of x's rows)."""
    inside = (row < num_rows)[:, None]
    x_at = x_ptr + row[:, None] * x_stride + step[None, :]
    w_at = weight_ptr + column[None, :] * K + step[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_at + k, mask=inside, other=0.0)
        w = tl.load(w_at + k)
        acc = tl.dot(x, w, acc)
        if GATED:
            acc_up = tl.dot(x, tl.load(w_at + gate_rows * K + k), acc_up)
        if NORM:
            values = x.to(tl.float32)
            squares += tl.sum(values * values, axis=1)
    return acc, acc_up, squares


@triton.jit(do_not_specialize=["num_rows"])  # one compilation for every step
def _skinny_gemm_kernel(
    x_ptr, weight_ptr, out_ptr, residual_ptr, partial_ptr, arrived_ptr, num_rows, num_columns, x_stride, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, K: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs: (column tiles, row tiles, SPLIT_K). Columns are those of the output; all sizes fit their tiles
    but the rows."""
    n_tile, m_tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    k_begin = part * (K // SPLIT_K)
    if PDL:
        gdc_launch_dependents()
        if m_tile == 0:
            line = tl.minimum(tl.arange(0, LINES) * 64, K // SPLIT_K - 64)  # in 16-bit elements
            slab = weight_ptr + column[:, None] * K + k_begin + line[None, :]
            _prefetch_l2(slab)
            if GATED:
                _prefetch_l2(slab + num_columns * K)
        gdc_wait()
    acc, acc_up, squares = _product(
        x_ptr, weight_ptr, row, column, step, x_stride, k_begin, k_begin + K // SPLIT_K, num_rows,
        NORM, GATED, num_columns, BLOCK_M, BLOCK_N, BLOCK_K, K, STAGES,
    )  # fmt: skip
    inside = (row < num_rows)[:, None]
    at = row[:, None] * num_columns + column[None, :]
    finish = True
    if SPLIT_K > 1:  # neither NORM nor GATED
        size = num_rows * num_columns
        tl.store(partial_ptr + part * size + at, acc, mask=inside)
        tl.debug_barrier()  # all of the program's stores before its arrival
        tile = m_tile * tl.num_programs(0) + n_tile
        finish = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if finish:
            tl.debug_barrier()
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for other in tl.static_range(SPLIT_K):
                acc += tl.load(partial_ptr + other * size + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if finish:
        if NORM:
            scale = (1.0 / tl.sqrt(squares / K + eps))[:, None]
            acc = acc * scale
            acc_up = acc_up * scale
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        if RESIDUAL:
            acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def fold_norm(weight: Tensor, norm_weight: Tensor) -> Tensor:
    """The matrix [N, K] that does RMSNorm's multiplication by norm_weight [K] as well; computed in float32."""
    return (weight.float() * norm_weight.float()).to(weight.dtype)


def default_tiles(num_rows: int, num_columns: int, k: int, epilogue: Epilogue) -> Tiles:
    """Enough programs for 132 multiprocessors: small tiles for wide products, K split for narrow ones."""
    block_m, block_n = 64, 64
    block_k = 64 if epilogue == "silu_mul" else 128  # two weights' tiles a step
    programs = triton.cdiv(num_rows, block_m) * (num_columns // block_n)
    split_k = 1
    while epilogue == "residual" and programs * split_k * 2 <= 160 and k % (split_k * 2 * 128) == 0:
        split_k *= 2
    return Tiles(block_m, block_n, block_k, split_k, 4, 4)


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    epilogue: Epilogue = "none",
    norm_eps: float | None = None,
    residual: Tensor | None = None,
    workspace: Workspace | None = None,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K] · weight [N, K]ᵀ in 16 bit, float32 accumulators -> [M, N], or [M, N/2] for silu_mul.

    norm_eps: x is normalised by its root mean square first (weight from `fold_norm`). silu_mul: the first half of the
    weight's rows is the gate: silu(gate) · up. residual: adds `residual` [M, N] (and may write into it: out=residual).
    `tiles.split_k` > 1 needs a workspace, and neither norm nor silu_mul.
    """
    num_rows, k = x.shape
    gated = epilogue == "silu_mul"
    num_columns = len(weight) // 2 if gated else len(weight)
    tiles = default_tiles(num_rows, num_columns, k, epilogue) if tiles is None else tiles
    assert num_columns % tiles.block_n == k % (tiles.block_k * tiles.split_k) == 0, (
        f"a product of {num_columns} columns and depth {k} does not divide into {tiles}: choose other tiles"
    )
    assert tiles.split_k == 1 or (norm_eps is None and not gated and workspace is not None), (
        "splitting K needs a workspace and goes with neither norm nor silu_mul"
    )
    if tiles.split_k > 1 and workspace is not None:
        assert tiles.split_k * num_rows * num_columns <= len(workspace.partial), (
            "the workspace is too small: enlarge it"
        )
    out = x.new_empty(num_rows, num_columns) if out is None else out
    grid = (num_columns // tiles.block_n, triton.cdiv(num_rows, tiles.block_m), tiles.split_k)
    lines = triton.next_power_of_2(k // tiles.split_k * x.element_size() // _PREFETCH_BYTES)
    _skinny_gemm_kernel[grid](
        x, weight, out, residual,
        None if workspace is None else workspace.partial, None if workspace is None else workspace.arrived,
        num_rows, num_columns, x.stride(0), 0.0 if norm_eps is None else norm_eps,
        NORM=norm_eps is not None, GATED=gated, RESIDUAL=epilogue == "residual", K=k, SPLIT_K=tiles.split_k,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, STAGES=tiles.num_stages, LINES=lines,
        num_warps=tiles.num_warps, **pdl(x),
    )  # fmt: skip
    return out
