"""SwiGLU from the fused gate and up projection, and GELU with the bias of the product before it."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl

_BLOCK = 1024


@triton.jit
def swiglu(gate, up):
    """silu(gate) · up, float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = gate_up_ptr + row * 2 * size + column
    gate = tl.load(pair, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pair + size, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, swiglu(gate, up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_kernel(x_ptr, bias_ptr, out_ptr, size, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate_up [T, 2·I] contiguous, gate first -> silu(gate) · up [T, I]."""
    num_tokens, both = gate_up.shape
    size = both // 2
    out = gate_up.new_empty(num_tokens, size) if out is None else out
    block = min(_BLOCK, next_power_of_2(size))
    _silu_mul_kernel[(num_tokens, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block, **pdl(gate_up))
    return out


def gelu(x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Exact GELU of x (+ bias), x [T, I] contiguous, bias [I] -> [T, I]. `out` may be x."""
    num_tokens, size = x.shape
    out = x.new_empty(num_tokens, size) if out is None else out
    block = min(_BLOCK, next_power_of_2(size))
    _gelu_kernel[(num_tokens, triton.cdiv(size, block))](
        x, bias, out, size, HAS_BIAS=bias is not None, BLOCK=block, **pdl(x)
    )
    return out
