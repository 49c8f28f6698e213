"""From hidden states to the bytes of each row: pooling, projection, cut, normalisation, conversion.

A row of an encode step says what its sequence becomes (columns of ipc.step):
    ROW_TYPE_START     position at which token type 1 begins; negative: all tokens have type 0
    ROW_POOLING        POOLING_CODES; -1: the model's own
    ROW_DTYPE          DTYPE_CODES
    ROW_DIMENSIONS     keep the first so many values; -1: all
    ROW_NORMALIZE      1 or 0; -1: the model's own. Applied after the cut
    ROW_OUTPUT_OFFSET  where in `values` the row begins, bytes
and the row's bytes are, by dtype:
    float32  the values, native byte order
    int8     round(127 · tanh x) of a model trained for it, round(127 · x / max|x|) of any other; compare by cosine
    binary   a bit a value, 1 where x >= 0, least significant bit first, the last byte filled with zeros
A row that fails (status not STATUS_OK) is all zeros. Rows of scores know float32 only.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ipc.step import (
    DTYPE_CODES,
    POOLING_CODES,
    ROW_DIMENSIONS,
    ROW_DTYPE,
    ROW_NORMALIZE,
    ROW_OUTPUT_OFFSET,
    ROW_POOLING,
)
from rose.attention.interface import Sequences
from rose.batch import MODEL_DEFAULT

_DTYPES = {code: name for name, code in DTYPE_CODES.items()}
_POOLINGS = {code: name for name, code in POOLING_CODES.items()}


class OutputDefaults(NamedTuple):
    """What -1 stands for, and how int8 rows are made."""

    pooling: str
    dimension: int
    normalize: bool
    int8: Literal["tanh", "scaled"]


class RowGroup(NamedTuple):
    """Rows of a step that become the same kind of output."""

    rows: list[int]
    pooling: str
    dtype: str
    dimension: int
    normalize: bool
    offsets: NDArray[np.int32]  # of each row's bytes


def group_rows(table: NDArray[np.int32], defaults: OutputDefaults) -> list[RowGroup]:
    """Groups the rows of `table` [N, 8] by what they become. Most steps have one group."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    for row, kind in enumerate(map(tuple, table[:, ROW_POOLING : ROW_NORMALIZE + 1].tolist())):
        kinds.setdefault(kind, []).append(row)
    return [_group(table, rows, defaults) for rows in kinds.values()]


def _group(table: NDArray[np.int32], rows: list[int], defaults: OutputDefaults) -> RowGroup:
    line = table[rows[0]].tolist()
    pooling, dimension, normalize = line[ROW_POOLING], line[ROW_DIMENSIONS], line[ROW_NORMALIZE]
    assert dimension == MODEL_DEFAULT or 0 < dimension <= defaults.dimension, (
        f"a row asks for {dimension} of {defaults.dimension} dimensions: refuse such requests at the door"
    )
    return RowGroup(
        rows=rows,
        pooling=defaults.pooling if pooling == MODEL_DEFAULT else _POOLINGS[pooling],
        dtype=_DTYPES[line[ROW_DTYPE]],
        dimension=defaults.dimension if dimension == MODEL_DEFAULT else dimension,
        normalize=defaults.normalize if normalize == MODEL_DEFAULT else bool(normalize),
        offsets=table[rows, ROW_OUTPUT_OFFSET],
    )


def pool(hidden: Tensor, sequences: Sequences, pooling: str) -> Tensor:
    """hidden [T, H] -> float32 [N, H], one row a sequence."""
    offsets = sequences.cu_seqlens
    if pooling == "cls":
        return hidden[offsets[:-1]].float()
    if pooling == "last_token":
        return hidden[offsets[1:] - 1].float()
    return torch.segment_reduce(hidden.float(), "mean", offsets=offsets, axis=0, unsafe=True)


def convert(vectors: Tensor, group: RowGroup, int8: Literal["tanh", "scaled"]) -> Tensor:
    """vectors float32 [n, D] -> the rows' bytes, uint8 [n, row_bytes]."""
    vectors = vectors[:, : group.dimension]
    if group.normalize:
        vectors = F.normalize(vectors, dim=-1)
    if group.dtype == "int8":
        return _to_int8(vectors, int8).view(torch.uint8)
    if group.dtype == "binary":
        return _to_bits(vectors)
    return vectors.contiguous().view(torch.uint8)


def _to_int8(vectors: Tensor, how: Literal["tanh", "scaled"]) -> Tensor:
    if how == "tanh":
        values = vectors.tanh()
    else:
        values = vectors / vectors.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return values.mul_(127).round_().to(torch.int8)


def _to_bits(vectors: Tensor) -> Tensor:
    bits = F.pad((vectors >= 0).to(torch.uint8), (0, -vectors.shape[1] % 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=vectors.device)
    return (bits.view(len(bits), -1, 8) * weights).sum(dim=-1, dtype=torch.uint8)
