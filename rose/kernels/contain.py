"""Keeps values that are not finite from attention kernels that read keys past a sequence's end and weigh them with 0.

0 times NaN is NaN, so through such a kernel one sequence would fail the one before it, and old tokens in the padding
the last one. A token whose values are not finite gets zeros for them, which no weight turns into anything, and NaN for
its keys: scores of other sequences are masked by choice, not by arithmetic, so NaN reaches only whoever attends to the
token, as it would have done anyway.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl

REACH = 256  # keys: no kernel's tile is wider, so past an end none reads further
_ROWS = 8  # tokens of one program
_LARGEST = tl.constexpr(3.4028234663852886e38)  # finite float32


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _contain_kernel(
    k_ptr, v_ptr, cu_seqlens_ptr, num_seqs, num_tokens, k_stride, v_stride, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(cu_seqlens_ptr + seq)
    end = num_tokens
    if seq < num_seqs:
        end = tl.load(cu_seqlens_ptr + seq + 1)
    first = start + tl.program_id(1) * ROWS
    if first < end:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.arange(0, BLOCK)
        mask = (row < end)[:, None] & (column < width)[None, :]
        v_at = v_ptr + row[:, None] * v_stride + column[None, :]
        values = tl.load(v_at, mask=mask, other=0.0).to(tl.float32)
        bad = tl.max((~(tl.abs(values) <= _LARGEST)).to(tl.int32), axis=1)  # NaN compares with nothing
        if tl.max(bad, axis=0) > 0:
            mask = mask & (bad > 0)[:, None]
            zeros = tl.zeros((ROWS, BLOCK), v_ptr.dtype.element_ty)
            tl.store(v_at, zeros, mask=mask)
            tl.store(k_ptr + row[:, None] * k_stride + column[None, :], zeros + float("nan"), mask=mask)


def contain(k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    """In place, the first REACH tokens of each sequence and of the padding behind the last.

    k, v [T, num_kv_heads, head_dim], 16 bit, a token's heads without gaps; cu_seqlens int32 [N+1] on the device, its
    last at most T.
    """
    num_seqs, width = len(cu_seqlens) - 1, v.shape[1] * v.shape[2]
    assert k.stride()[1:] == v.stride()[1:] == (v.shape[2], 1), "a token's heads must follow each other without gaps"
    _contain_kernel[num_seqs + 1, REACH // _ROWS](
        k, v, cu_seqlens, num_seqs, len(v), k.stride(0), v.stride(0), width,
        ROWS=_ROWS, BLOCK=next_power_of_2(width), num_warps=8, **pdl(v),
    )  # fmt: skip
