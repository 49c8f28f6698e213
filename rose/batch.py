"""A step's arrays as tensors: the rows [first, last) of a slot, packed without padding.

Host work only reads small arrays; the copies to a device are asynchronous.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rose.attention.interface import Sequences


class EncodeBatch(NamedTuple):
    """T tokens of N sequences."""

    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T], from 0 in each sequence
    token_types: Tensor | None  # int32 [T]; None where all are 0
    sequences: Sequences


def encode_batch(
    input_ids: NDArray[np.int32], cu_seqlens: NDArray[np.int32], type_starts: NDArray[np.int32], device: torch.device
) -> EncodeBatch:
    """Packs sequences for `device`.

    input_ids [T] · cu_seqlens [N+1], its first offset need not be 0 · type_starts [N], where token type 1 begins in
    each sequence, negative for nowhere.
    """
    offsets = cu_seqlens - cu_seqlens[0]
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    positions = np.arange(len(input_ids), dtype=np.int32) - starts
    token_types = None
    if (type_starts >= 0).any():
        begins = np.where(type_starts < 0, np.iinfo(np.int32).max, type_starts).astype(np.int32)
        token_types = _tensor((positions >= np.repeat(begins, np.diff(offsets))).astype(np.int32), device)
    return EncodeBatch(
        input_ids=_tensor(input_ids, device),
        positions=_tensor(positions, device),
        token_types=token_types,
        sequences=Sequences(offsets.tolist(), _tensor(offsets, device)),
    )


def _tensor(array: NDArray[np.int32], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
