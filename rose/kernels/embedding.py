"""Embedding lookup, with what follows it at once: positions, types and LayerNorm (BERT), or the first RMSNorm (Qwen3).

An id outside its table reads the nearest row instead of foreign memory: padding rows come out finite, whatever stands
in them. Rows with bad ids are failed by the host, which checks them before the launch.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl, row_warps


@triton.jit
def _row(table_ptr, index, num_rows, hidden_size, column, mask):
    index = tl.minimum(tl.maximum(index, 0), num_rows - 1).to(tl.int64)
    return tl.load(table_ptr + index * hidden_size + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _embed_rms_kernel(
    ids_ptr, word_ptr, weight_ptr, out_ptr, normed_ptr, num_words, hidden_size, eps,
    NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden_size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = _row(word_ptr, tl.load(ids_ptr + token), num_words, hidden_size, column, mask)
    tl.store(out_ptr + token * hidden_size + column, x.to(out_ptr.dtype.element_ty), mask=mask)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        normed = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden_size + eps)) * weight
        tl.store(normed_ptr + token * hidden_size + column, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _embed_part_kernel(
    ids_ptr, word_ptr, out_ptr, begin, num_words, hidden_size, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden_size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = (tl.load(ids_ptr + token) - begin).to(tl.int64)
    num_columns = tl.where((index >= 0) & (index < num_words), hidden_size, 0)
    x = tl.load(word_ptr + index * hidden_size + column, mask=column < num_columns, other=0.0)
    tl.store(out_ptr + token * hidden_size + column, x, mask=mask)


@triton.jit
def _embed_layer_norm_kernel(
    ids_ptr, positions_ptr, types_ptr, word_ptr, position_ptr, type_ptr, weight_ptr, bias_ptr, out_ptr,
    num_words, num_positions, num_types, position_offset, hidden_size, eps,
    HAS_TYPES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden_size
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = _row(word_ptr, tl.load(ids_ptr + token), num_words, hidden_size, column, mask)
    position = tl.load(positions_ptr + token) + position_offset
    total += _row(position_ptr, position, num_positions, hidden_size, column, mask)
    token_type = 0
    if HAS_TYPES:
        token_type = tl.load(types_ptr + token)
    total += _row(type_ptr, token_type, num_types, hidden_size, column, mask)
    centred = tl.where(mask, total - tl.sum(total, axis=0) / hidden_size, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / hidden_size + eps)
    out = centred * scale * weight + bias
    tl.store(out_ptr + token * hidden_size + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def embed(input_ids: Tensor, word: Tensor) -> Tensor:
    """input_ids int32 [T], word [V, H] -> [T, H]."""
    return _embed(input_ids, word, None, 0.0)[0]


def embed_part(input_ids: Tensor, word: Tensor, *, begin: int, num_words: int, out: Tensor) -> Tensor:
    """Of a table that is divided: zeros for ids outside of `begin` and the `num_words` from there, which are the first
    rows of word [V / size, H]. input_ids int32 [T]; into out [T, H], which it returns."""
    block = next_power_of_2(word.shape[1])
    _embed_part_kernel[(len(input_ids),)](
        input_ids, word, out, begin, num_words, word.shape[1], BLOCK=block, num_warps=row_warps(block), **pdl(word)
    )  # fmt: skip
    return out


def embed_rms_norm(input_ids: Tensor, word: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x, rms_norm(x) · weight) of x = word[input_ids]. input_ids int32 [T], word [V, H], weight [H]; each [T, H]."""
    return _embed(input_ids, word, weight, eps)


def _embed(input_ids: Tensor, word: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    num_words, hidden_size = word.shape
    out = word.new_empty(len(input_ids), hidden_size)
    normed = out if weight is None else word.new_empty(out.shape)
    block = next_power_of_2(hidden_size)
    _embed_rms_kernel[(len(input_ids),)](
        input_ids, word, weight, out, normed, num_words, hidden_size, eps,
        NORM=weight is not None, BLOCK=block, num_warps=row_warps(block), **pdl(word),
    )  # fmt: skip
    return out, normed


def embed_layer_norm(
    input_ids: Tensor,
    positions: Tensor,
    token_types: Tensor | None,
    *,
    word: Tensor,
    position: Tensor,
    token_type: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    position_offset: int = 0,
) -> Tensor:
    """layer_norm(word[id] + position[pos + offset] + token_type[type]) -> [T, H].

    input_ids, positions, token_types int32 [T]; None: every type is 0. Tables [rows, H]; weight, bias [H].
    """
    hidden_size = word.shape[1]
    out = word.new_empty(len(input_ids), hidden_size)
    block = next_power_of_2(hidden_size)
    _embed_layer_norm_kernel[(len(input_ids),)](
        input_ids, positions, token_types, word, position, token_type, weight, bias, out,
        len(word), len(position), len(token_type), position_offset, hidden_size, eps,
        HAS_TYPES=token_types is not None, BLOCK=block, num_warps=row_warps(block), **pdl(word),
    )  # fmt: skip
    return out
