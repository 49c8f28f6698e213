"""A generate step as the host sees it: the slot's tables, checked, and the shapes that follow from them.

Lengths and positions of sequences are not here: the device knows them (rose.slots).
"""

from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ipc.step import (
    GEN_DRAFT_LENGTH,
    GEN_INPUT_OFFSET,
    GEN_KIND,
    GEN_MAX_LENGTH,
    GEN_NUM_TOKENS,
    GEN_SAMPLE,
    GEN_SLOT,
    KIND_PREFILL,
    STATUS_BAD_TOKEN,
    StepPlan,
)
from ipc.step_ring import Arrays
from ipc.types import ModelFacts
from rose.batch import Int32s
from rose.host_slots import HostSlots
from rose.slots import Spans


class GenerateRows(NamedTuple):
    """R rows with T new tokens in all. Host arrays; views of the slot where nothing had to be changed."""

    table: Int32s  # [R, 8], columns: ipc.step
    input_ids: Int32s  # the step's, all within the vocabulary
    status: Int32s  # [R]: what a row fails with before it runs
    num_given: Int32s  # [R]: ids of a prefill row that it computes; 0 for others
    cu_seqlens: Int32s  # [R + 1]: new tokens of each row
    draft_length: int = 0  # the plan's
    keep_draft: bool = True  # the plan's

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def slots(self) -> Int32s:
        return self.table[:, GEN_SLOT]

    @property
    def samples(self) -> NDArray[np.bool_]:
        return self.table[:, GEN_SAMPLE] != 0

    @property
    def num_drafts(self) -> Int32s:
        """[R]: drafts that a row computes behind its last token, at most."""
        return self.table[:, GEN_DRAFT_LENGTH]

    @property
    def has_prompts(self) -> bool:
        return bool(self.num_given.any())

    def with_drafts(self, num_drafts: Int32s) -> "GenerateRows":
        """The same rows with fewer drafts, int32 [R]: what was not found need not be computed."""
        if (num_drafts == self.num_drafts).all():
            return self
        table = self.table.copy()
        table[:, GEN_NUM_TOKENS] -= self.num_drafts - num_drafts
        table[:, GEN_DRAFT_LENGTH] = num_drafts
        cu_seqlens = np.concatenate(([0], np.cumsum(table[:, GEN_NUM_TOKENS]))).astype(np.int32)
        return self._replace(table=table, cu_seqlens=cu_seqlens)

    @property
    def given(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of the tokens that prefill rows bring: which of the step's T they are, their rows, their positions."""
        rows = np.repeat(np.arange(len(self.table)), np.diff(self.cu_seqlens))
        tokens = np.flatnonzero(self.num_given[rows])
        rows = rows[tokens]
        starts = self.table[:, GEN_MAX_LENGTH] - self.num_given - self.cu_seqlens[:-1]
        return tokens, rows, tokens + starts[rows]

    @property
    def max_q_len(self) -> int:
        return int(np.diff(self.cu_seqlens).max())

    @property
    def max_kv_len(self) -> int:
        return int(self.table[:, GEN_MAX_LENGTH].max())


def read_rows(plan: StepPlan, arrays: Arrays, facts: ModelFacts, host: HostSlots) -> GenerateRows:
    """The rows of a plan, at least one. An id outside the vocabulary is read as 0, in a copy: its row fails alone.

    What else is wrong with them is a fault of the scheduler.
    """
    table = cast(Int32s, arrays["rows"][: plan.num_seqs])
    input_ids = cast(Int32s, arrays["input_ids"][: plan.num_tokens])
    num_tokens, is_prefill = table[:, GEN_NUM_TOKENS], table[:, GEN_KIND] == KIND_PREFILL
    cu_seqlens = np.concatenate(([0], np.cumsum(num_tokens))).astype(np.int32)
    _check(plan, table, cu_seqlens, facts)
    host.check_rows(table, plan.step)
    status = host.status[table[:, GEN_SLOT]]
    outside = input_ids.view(np.uint32) >= facts.vocab_size  # negative ids wrap to large ones
    if outside.any():
        input_ids = np.where(outside, 0, input_ids)
        begins = table[:, GEN_INPUT_OFFSET]
        for row in np.flatnonzero(is_prefill):
            if outside[begins[row] : begins[row] + num_tokens[row] + (not table[row, GEN_SAMPLE])].any():
                status[row] = STATUS_BAD_TOKEN
    num_given = np.where(is_prefill, num_tokens, 0)
    return GenerateRows(table, input_ids, status, num_given, cu_seqlens, plan.draft_length, plan.keep_draft)


def spans(lengths: NDArray[np.integer], device: torch.device) -> Spans:
    """Of rows with so many tokens [R] each."""
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))
    rows = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(cu_seqlens[-1]) - cu_seqlens[rows]
    return Spans(
        torch.from_numpy(cu_seqlens.astype(np.int32)).to(device, non_blocking=True),
        torch.from_numpy(rows).to(device, non_blocking=True),
        torch.from_numpy(offsets).to(device, non_blocking=True),
    )


def _check(plan: StepPlan, table: Int32s, cu_seqlens: Int32s, facts: ModelFacts) -> None:
    """Faults of the scheduler. Lengths that the arrays cannot hold would be read past their ends otherwise."""
    step = f"step {plan.step}"
    assert plan.draft_length <= facts.max_draft_tokens, f"{step}: more drafts than max_draft_tokens"
    assert table[:, GEN_NUM_TOKENS].min() > 0, f"{step} has an empty row"
    assert cu_seqlens[-1] <= facts.max_num_batched_tokens, f"{step} has {cu_seqlens[-1]} tokens, over its limit"
    drafts = table[:, GEN_DRAFT_LENGTH]
    assert 0 <= drafts.min() <= drafts.max() <= plan.draft_length, f"{step}: a row with more drafts than its plan"
    assert (table[drafts > 0, GEN_NUM_TOKENS] == drafts[drafts > 0] + 1).all(), f"{step}: drafts without tokens"
    slots = table[:, GEN_SLOT]
    assert slots.min() >= 0, f"{step}: a negative slot"
    assert slots.max() < facts.max_num_seqs, f"{step}: slot {slots.max()} of {facts.max_num_seqs}"
    assert len(np.unique(slots)) == len(slots), f"{step}: two rows of one slot"
    ends = table[:, GEN_INPUT_OFFSET] + table[:, GEN_NUM_TOKENS]
    prefill = table[:, GEN_KIND] == KIND_PREFILL
    assert not (prefill & (ends > plan.num_tokens)).any(), f"{step}: ids past the end of input_ids"
