"""Which blocks of a proposer's cache hold what they should: a flag a block, on the device.

A decode step with `keep_draft` off computes nothing for the proposer, and leaves a gap. Blocks that a gap lies in or
before are marked, not sequences: who comes upon them by a prefix hit has the same gap, and after a preemption only what
is computed again is whole. Steps with prompts always fill the proposer's cache, so what many share has no gaps.
"""

import torch
from torch import Tensor

from rose.slots import Slots
from rose.speculation.protocol import Closing


class KeptBlocks:
    """Of the cache beside that of `slots`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._whole = torch.zeros(slots.dummy_block + 1, dtype=torch.bool, device=slots.ids.device)

    def cover(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """bool [R]: whether the first `lengths` (int32 [R]) positions of slots `rows` (int32 [R]) have no gap."""
        table = self._slots.block_table[rows]
        begins = torch.arange(table.shape[1], device=rows.device) * self._slots.block_size
        return (self._whole[table] | (begins >= lengths[:, None])).all(1)

    def close(self, step: Closing, *, filled: bool) -> None:
        """The step's tokens have entries (`filled`), or not."""
        paged = step.inputs.paged
        blocks = paged.slot_mapping // self._slots.block_size
        if not filled:
            self._whole[blocks] = False
            return
        before = self.cover(step.inputs.slots, paged.kv_lengths - paged.cu_seqlens_q.diff())
        self._whole[blocks] = before[step.inputs.spans.rows]
