"""Log probabilities of raw logits: of one token a row, and of the most probable ones.

Each tile's largest keys and its weight, then one program a row that merges them. Ties go to the lower id.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl
from rose.kernels.sampling_choose import best_kernel, row_best
from rose.kernels.sampling_math import EXACT, NO_KEY, TILE, key_id, key_logit, keys_of, weight
from rose.sampling.distribution import WEIGHT_BITS

_UNIT = tl.constexpr(2.0**-WEIGHT_BITS)


@triton.jit
def _tiles_kernel(
    logits_ptr, best_ptr, sums_ptr, keys_ptr, row_stride, num_tiles, vocab_size, count,
    TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums int64 [R, num_tiles]; keys int64 [R, num_tiles, count], largest first."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < vocab_size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=float("-inf"))
    maximum = key_logit(row_best(best_ptr, row, num_tiles, TILES))
    tl.store(sums_ptr + row * num_tiles + tile, tl.sum(weight(x, maximum, 1.0), axis=0))
    keys = tl.where(inside, keys_of(x, column), NO_KEY)
    for index in range(count):
        largest = tl.max(keys, axis=0)
        tl.store(keys_ptr + (row * num_tiles + tile) * count + index, largest)
        keys = tl.where(keys == largest, NO_KEY, keys)


@triton.jit
def _merge_kernel(
    logits_ptr, tokens_ptr, best_ptr, sums_ptr, keys_ptr, logprobs_ptr, top_ids_ptr, top_logprobs_ptr, row_stride,
    num_tiles, count, TILES: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    maximum = key_logit(row_best(best_ptr, row, num_tiles, TILES))
    tile = tl.arange(0, TILES)
    total = tl.sum(tl.load(sums_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0), axis=0)
    log_total = tl.log(total.to(tl.float32) * _UNIT)
    x = tl.load(logits_ptr + row * row_stride + tl.load(tokens_ptr + row))
    tl.store(logprobs_ptr + row, tl.where(x == x, x, float("-inf")) - maximum - log_total)
    key = tl.arange(0, KEYS)
    keys = tl.load(keys_ptr + row * num_tiles * count + key, mask=key < num_tiles * count, other=NO_KEY)
    for index in range(count):
        largest = tl.max(keys, axis=0)
        tl.store(top_ids_ptr + row * count + index, key_id(largest))
        tl.store(top_logprobs_ptr + row * count + index, key_logit(largest) - maximum - log_total)
        keys = tl.where(keys == largest, NO_KEY, keys)


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits float32 [R, V], tokens int32 [R]; count at most V.

    Natural logarithms: float32 [R] of tokens; int32 [R, count] and float32 [R, count] of the most probable.
    """
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    tiles = next_power_of_2(num_tiles)
    best, sums = (logits.new_empty(num_rows, num_tiles, dtype=torch.int64) for _ in range(2))
    keys = logits.new_empty(num_rows, num_tiles, count, dtype=torch.int64)
    logprobs, top_logprobs = logits.new_empty(num_rows), logits.new_empty(num_rows, count)
    top_ids = logits.new_empty(num_rows, count, dtype=torch.int32)
    grid, launch = (num_rows, num_tiles), {**pdl(logits), **EXACT}
    best_kernel[grid](logits, best, logits.stride(0), num_tiles, vocab_size, TILE=TILE, **launch)
    _tiles_kernel[grid](
        logits, best, sums, keys, logits.stride(0), num_tiles, vocab_size, count, TILES=tiles, TILE=TILE, **launch
    )
    _merge_kernel[(num_rows,)](
        logits, tokens, best, sums, keys, logprobs, top_ids, top_logprobs, logits.stride(0), num_tiles, count,
        TILES=tiles, KEYS=next_power_of_2(max(1, num_tiles * count)), **launch,
    )  # fmt: skip
    return logprobs, top_ids, top_logprobs
