"""A step's arrays: rows of a slot, checked and divided, then packed as tensors for a device. No padding anywhere.

Host work reads small arrays only; copies to a device are asynchronous.
"""

from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.step import DTYPE_CODES, ROW_DTYPE, ROW_OUTPUT_OFFSET, ROW_TYPE_START, StepPlan
from ipc.step_ring import Arrays
from ipc.types import ModelFacts
from rose.attention.interface import Sequences

MODEL_DEFAULT = -1
MIN_PART_TOKENS = 64  # what is worth a thread of its own: below it reading the weights is the work, so share that

Int32s = NDArray[np.int32]


class Rows(NamedTuple):
    """Sequences of one step, as views of its slot. N rows, T tokens."""

    input_ids: Int32s  # [T], all within the vocabulary
    cu_seqlens: Int32s  # [N+1], its first offset need not be 0
    table: Int32s  # [N, 8], columns: ipc.step
    bad_tokens: NDArray[np.bool_]  # [N], which rows had ids outside the vocabulary
    status: Tensor  # int32 [N], out
    values: Tensor  # uint8, out; each row at its offset


class EncodeBatch(NamedTuple):
    """What a model reads: T tokens of N sequences."""

    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T], from 0 in each sequence
    token_types: Tensor | None  # int32 [T]; None where all are 0
    sequences: Sequences

    def first(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> each sequence's first token [N, H]; of an empty sequence any."""
        return hidden[self.sequences.cu_seqlens[:-1].clamp(max=len(hidden) - 1)]

    def last(self, hidden: Tensor) -> Tensor:
        return hidden[self.sequences.cu_seqlens[1:] - 1]


def check_step(plan: StepPlan, arrays: Arrays, facts: ModelFacts) -> NDArray[np.bool_] | None:
    """Which of the step's tokens [T] are outside the vocabulary; None where none is, as nearly always.

    Their rows fail alone; whatever else is wrong with a step is a fault of the scheduler.
    """
    cu_seqlens = cast(Int32s, arrays["cu_seqlens"][: plan.num_seqs + 1])
    input_ids = cast(Int32s, arrays["input_ids"][: plan.num_tokens]).view(np.uint32)  # negative ids wrap to large ones
    assert cu_seqlens[0] == 0, f"step {plan.step}: cu_seqlens must begin with 0"
    assert cu_seqlens[-1] == plan.num_tokens, f"step {plan.step}: cu_seqlens must end with {plan.num_tokens}"
    shortest = longest = plan.num_tokens
    if plan.num_seqs > 1:  # a query alone shall be quick
        lengths = np.diff(cu_seqlens)
        shortest, longest = lengths.min(), lengths.max()
    assert shortest > 0, f"step {plan.step} has an empty sequence: refuse it at the door"
    assert longest <= facts.max_model_len, (
        f"step {plan.step} has a sequence of {longest} tokens, over max_model_len: refuse it at the door"
    )
    return input_ids >= facts.vocab_size if input_ids.max() >= facts.vocab_size else None


def step_rows(plan: StepPlan, arrays: Arrays, facts: ModelFacts, max_parts: int) -> list[Rows]:
    """The rows of an encode step, in at most `max_parts` parts of about equal tokens.

    An id outside the vocabulary is read as 0, in a copy: its row fails alone.
    """
    outside = check_step(plan, arrays, facts)
    cu_seqlens = cast(Int32s, arrays["cu_seqlens"][: plan.num_seqs + 1])
    input_ids = cast(Int32s, arrays["input_ids"][: plan.num_tokens])
    bad_tokens = np.zeros(plan.num_seqs, np.bool_)
    if outside is not None:
        input_ids = np.where(outside, 0, input_ids)
        bad_tokens = np.logical_or.reduceat(outside, cu_seqlens[:-1])
    table = cast(Int32s, arrays["rows"])
    status, values = torch.from_numpy(arrays["status"]), torch.from_numpy(arrays["values"])
    return [
        Rows(
            input_ids=input_ids[cu_seqlens[first] : cu_seqlens[last]],
            cu_seqlens=cu_seqlens[first : last + 1],
            table=table[first:last],
            bad_tokens=bad_tokens[first:last],
            status=status[first:last],
            values=values,
        )
        for first, last in pairwise(_cuts(cu_seqlens, max_parts))
    ]


def encode_batch(rows: Rows, device: torch.device) -> EncodeBatch:
    """Packs `rows` for `device`."""
    offsets = rows.cu_seqlens - rows.cu_seqlens[0]
    lengths = np.diff(offsets)
    positions = np.arange(len(rows.input_ids), dtype=np.int32) - np.repeat(offsets[:-1], lengths)
    type_starts = rows.table[:, ROW_TYPE_START]
    token_types = None
    if (type_starts >= 0).any():
        begins = np.where(type_starts < 0, np.iinfo(np.int32).max, type_starts)
        token_types = _tensor((positions >= np.repeat(begins, lengths)).astype(np.int32), device)
    return EncodeBatch(
        input_ids=_tensor(rows.input_ids, device),
        positions=_tensor(positions, device),
        token_types=token_types,
        sequences=Sequences(offsets.tolist(), _tensor(offsets, device)),
    )


def write_plain_rows(arrays: Arrays, lengths: list[int], dimension: int) -> None:
    """Fills `cu_seqlens` and `rows` of a slot: whole float32 vectors as the model's files want them, without gaps."""
    num_seqs = len(lengths)
    arrays["cu_seqlens"][: num_seqs + 1] = np.cumsum([0, *lengths])
    table = arrays["rows"][:num_seqs]
    table[:] = MODEL_DEFAULT
    table[:, ROW_DTYPE] = DTYPE_CODES["float32"]
    table[:, ROW_OUTPUT_OFFSET] = np.arange(num_seqs) * 4 * dimension


def _cuts(cu_seqlens: Int32s, max_parts: int) -> list[int]:
    """Row indices at which to divide, the first 0, the last N."""
    num_rows, num_tokens = len(cu_seqlens) - 1, int(cu_seqlens[-1])
    num_parts = max(1, min(num_rows, max_parts, num_tokens // MIN_PART_TOKENS))
    targets = [num_tokens * part // num_parts for part in range(1, num_parts)]
    middles = (cu_seqlens[:-1] + cu_seqlens[1:]) // 2
    return sorted({0, num_rows, *np.searchsorted(middles, targets).tolist()})


def _tensor(array: Int32s, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
