"""Which blocks of a proposer's cache hold what they should: a flag a block, on the device.

A decode step with `keep_draft` off computes nothing for the proposer, and leaves a gap. Blocks that a gap lies in or
before are marked, not sequences: who comes upon them by a prefix hit has the same gap, and after a preemption only what
is computed again is whole. Steps with prompts always fill the proposer's cache, so what many share has no gaps.
"""

import torch
from torch import Tensor

from rose.slots import Slots
from rose.speculation.protocol import Closing, DraftRows


class KeptBlocks:
    """Of the cache beside that of `slots`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._whole = torch.zeros(slots.dummy_block + 1, dtype=torch.bool, device=slots.ids.device)

    def limits(self, rows: DraftRows) -> Tensor | None:
        """How many drafts each row may have, int32 [R]: none where there is a gap before its last token. None where
        every row has one, and nothing need be computed; never so on a GPU, which is not waited for."""
        covered = self.cover(rows.slots, self._slots.num_tokens[rows.slots] - 1)
        return None if covered.is_cpu and not covered.any() else torch.where(covered, rows.limits, 0)

    def serves(self, step: Closing) -> bool:
        """Whether what a proposer computes of the step's tokens can be of use: some row has no gap before them. On a
        GPU, as above, always."""
        covered = self._covers_before(step)
        return not covered.is_cpu or bool(covered.any())

    def cover(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """bool [R]: whether the first `lengths` (int32 [R]) positions of slots `rows` (int32 [R]) have no gap."""
        table = self._slots.block_table[rows]
        begins = torch.arange(table.shape[1], device=rows.device) * self._slots.block_size
        return (self._whole[table] | (begins >= lengths[:, None])).all(1)

    def close(self, step: Closing, *, filled: bool) -> None:
        """The step's tokens have entries (`filled`), or not."""
        blocks = step.inputs.paged.slot_mapping // self._slots.block_size
        if not filled:
            self._whole[blocks] = False
            return
        self._whole[blocks] = self._covers_before(step)[step.inputs.spans.rows]

    def _covers_before(self, step: Closing) -> Tensor:
        paged = step.inputs.paged
        return self.cover(step.inputs.slots, paged.kv_lengths - paged.cu_seqlens_q.diff())
