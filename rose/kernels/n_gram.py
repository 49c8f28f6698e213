"""Drafts looked up in the sequence itself, as kernels: rose/speculation/n_gram.py, token for token.

The places of a row are cut into parts, a program each; then one program a row takes the best and copies what follows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl

_PART = 1024  # places looked at by one program


@triton.jit
def _match_kernel(
    slots_ptr, ids_ptr, num_tokens_ptr, best_ptr, ids_stride, num_parts,
    MAX_TOKENS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """best int64 [R, num_parts]: how many of the last tokens stand at the part's best place, and that place."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = part * PART + tl.arange(0, PART)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    length = tl.load(num_tokens_ptr + slot)
    ids_ptr += slot * ids_stride
    best = length.to(tl.int64) * 0
    if part * PART < length - 1:
        matches = place < length - 1
        number = tl.zeros((PART,), tl.int64)
        for back in tl.static_range(MAX_TOKENS):
            matches = matches & (place >= back)
            last = tl.load(ids_ptr + tl.maximum(length - 1 - back, 0))
            matches = matches & (tl.load(ids_ptr + place - back, mask=matches, other=-1) == last)
            number += matches.to(tl.int64)
        best = tl.max((number << 32) | place.to(tl.int64), axis=0)
    tl.store(best_ptr + row * num_parts + part, best)


@triton.jit
def _copy_kernel(
    slots_ptr, limits_ptr, ids_ptr, num_tokens_ptr, best_ptr, tokens_ptr, counts_ptr, ids_stride, num_parts, k,
    MIN_TOKENS: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part, entry = tl.arange(0, PARTS), tl.arange(0, K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    length = tl.load(num_tokens_ptr + slot)
    best = tl.max(tl.load(best_ptr + row * num_parts + part, mask=part < num_parts, other=0), axis=0)
    place = (best & 0x7FFFFFFF).to(tl.int32)
    found = (best >> 32) >= MIN_TOKENS
    period = tl.maximum(length - 1 - place, 1)
    following = tl.minimum(place + 1 + entry % period, ids_stride - 1)
    token = tl.load(ids_ptr + slot * ids_stride + following, mask=entry < tl.where(found, k, 0), other=0)
    tl.store(tokens_ptr + row * k + entry, token, mask=entry < k)
    tl.store(counts_ptr + row, tl.where(found, tl.load(limits_ptr + row), 0))


def look_up(
    slots: Tensor, limits: Tensor, ids: Tensor, num_tokens: Tensor, k: int, max_length: int, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Tokens int32 [R, k] and counts int32 [R] of rows whose slots and limits are int32 [R].

    ids int32 [S + 1, width], num_tokens int32 [S + 1], none of these slots' above `max_length`. `sizes`: the longest
    suffix that is looked for, and the shortest that counts.
    """
    assert slots.is_contiguous(), "read as dense"
    assert limits.is_contiguous(), "read as dense"
    num_rows, num_parts = len(slots), triton.cdiv(min(max_length, ids.shape[1]), _PART)
    best = slots.new_empty(num_rows, num_parts, dtype=torch.int64)
    tokens, counts = slots.new_empty(num_rows, k), torch.empty_like(slots)
    _match_kernel[(num_rows, num_parts)](
        slots, ids, num_tokens, best, ids.stride(0), num_parts, MAX_TOKENS=sizes[0], PART=_PART, **pdl(slots)
    )
    _copy_kernel[(num_rows,)](
        slots, limits, ids, num_tokens, best, tokens, counts, ids.stride(0), num_parts, k,
        MIN_TOKENS=sizes[1], PARTS=next_power_of_2(num_parts), K=next_power_of_2(k), num_warps=1, **pdl(slots),
    )  # fmt: skip
    return tokens, counts
