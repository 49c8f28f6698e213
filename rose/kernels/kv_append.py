"""New keys and values into their places of a paged cache, one program a token.

What goes to the last block, the dummy, is made finite. Rows put drafts there that nobody waits for, beyond the blocks
that they have, and read them again behind their other tokens, with a weight of zero: a stranger's NaN would reach them.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.attention.paged import Append
from rose.kernels.launch import next_power_of_2, pdl, row_warps


@triton.jit
def finite(x):
    """Zero for what is not."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)  # false for NaN


@triton.jit
def _kv_append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_stride, v_stride, dummy,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(slot_mapping_ptr + token)
    at = place.to(tl.int64) * WIDTH + column
    k = tl.load(k_ptr + token * k_stride + column, mask=mask)
    v = tl.load(v_ptr + token * v_stride + column, mask=mask)
    if place >= dummy:
        k, v = finite(k), finite(v)
    tl.store(k_cache_ptr + at, k, mask=mask)
    tl.store(v_cache_ptr + at, v, mask=mask)


def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v [T, kv_heads, head_dim] to the places `slot_mapping` (int32 [T]: block * block_size + offset) of the caches
    [blocks, block_size, kv_heads, head_dim], contiguous. Tokens may be any distance apart, heads of one follow each
    other. Of tokens with the same place any one remains, as happens in the dummy block, the last; what is not finite
    becomes zero there.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    assert {x.stride()[1:] for x in (k, v)} == {(head_dim, 1)}, "heads must be contiguous within a token"
    assert slot_mapping.is_contiguous(), "read as dense"
    width = num_kv_heads * head_dim
    block = next_power_of_2(width)
    _kv_append_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0),
        Append(k_cache, v_cache, slot_mapping).dummy,
        WIDTH=width, BLOCK=block, num_warps=row_warps(block), **pdl(k),
    )  # fmt: skip
