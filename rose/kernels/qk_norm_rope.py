"""Per-head RMSNorm of q and k and their rotation by position, in place on the packed q, k, v buffer.

One program turns 8 heads of one token: both halves of each head stay in registers between one read and one write. With
an `Append` they go from there into a paged cache too, beside v's heads: to the bit what kv_append would do next.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.attention.paged import Append
from rose.kernels.kv_append import finite
from rose.kernels.launch import pdl

_HEADS = 8  # of one program


@triton.jit
def _qk_norm_rope_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, positions_ptr, cos_ptr, sin_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr,
    row_stride, eps, dummy,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, APPEND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    turned = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] if APPEND else turned
    if NORM:
        is_q = (head < NUM_HEADS)[:, None]
        first_weight = tl.where(is_q, tl.load(q_weight_ptr + lane)[None, :], tl.load(k_weight_ptr + lane)[None, :])
        second_weight = tl.where(
            is_q, tl.load(q_weight_ptr + HALF + lane)[None, :], tl.load(k_weight_ptr + HALF + lane)[None, :]
        )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions_ptr + token).to(tl.int64)
    if APPEND:
        place = tl.load(slot_mapping_ptr + token)
    cos = tl.load(cos_ptr + position * HALF + lane)[None, :]
    sin = tl.load(sin_ptr + position * HALF + lane)[None, :]
    at = qkv_ptr + token * row_stride + head[:, None] * (2 * HALF) + lane[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    first_as_is, second_as_is = first, second
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        first = first * scale * first_weight.to(tl.float32)
        second = second * scale * second_weight.to(tl.float32)
    new_first = (first * cos - second * sin).to(qkv_ptr.dtype.element_ty)
    new_second = (second * cos + first * sin).to(qkv_ptr.dtype.element_ty)
    tl.store(at, new_first, mask=turned)
    tl.store(at + HALF, new_second, mask=turned)
    if APPEND:
        new_first = tl.where(turned, new_first, first_as_is.to(qkv_ptr.dtype.element_ty))
        new_second = tl.where(turned, new_second, second_as_is.to(qkv_ptr.dtype.element_ty))
        if place >= dummy:
            new_first, new_second = finite(new_first), finite(new_second)
        is_k = turned & (head >= NUM_HEADS)[:, None]
        is_v = mask & (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        k_at = (place.to(tl.int64) * NUM_KV_HEADS + head[:, None] - NUM_HEADS) * (2 * HALF) + lane[None, :]
        v_at = k_at - NUM_KV_HEADS * (2 * HALF)
        tl.store(k_cache_ptr + k_at, new_first, mask=is_k)
        tl.store(k_cache_ptr + k_at + HALF, new_second, mask=is_k)
        tl.store(v_cache_ptr + v_at, new_first, mask=is_v)
        tl.store(v_cache_ptr + v_at + HALF, new_second, mask=is_v)


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float = 1e-6,
    append: Append | None = None,
) -> None:
    """Normalises and turns the q and k heads of `qkv` in place; v is left alone. Without weights it only turns.

    qkv [T, >= (num_heads + num_kv_heads) · head_dim], heads of q first, then k, unit stride within a row; weights
    [head_dim]; positions int32 [T], each below the tables' length; cos, sin float32 [positions, head_dim / 2], the
    half-split rotation of Hugging Face's Llama and Qwen files. With `append` k's new heads and those of v, which follow
    them, are also written to its places.
    """
    k_cache, v_cache, slot_mapping = (None, None, None) if append is None else append
    if append is not None:
        assert {x.is_contiguous() for x in append} == {True}, "read and written as dense"
    num_read = num_heads + num_kv_heads * (1 if append is None else 2)
    grid = (qkv.shape[0], triton.cdiv(num_read, _HEADS))
    _qk_norm_rope_kernel[grid](
        qkv, q_weight, k_weight, positions, cos, sin, k_cache, v_cache, slot_mapping,
        qkv.stride(0), eps, 0 if append is None else append.dummy,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, HEADS=_HEADS,
        NORM=q_weight is not None, APPEND=append is not None, num_warps=2, **pdl(qkv),
    )  # fmt: skip
