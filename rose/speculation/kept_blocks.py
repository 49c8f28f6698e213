"""Which blocks of a proposer's cache hold what they should: a flag a block, on the device.

A decode step with `keep_draft` off computes nothing for the proposer, and leaves a gap. Blocks that a gap lies in or
before are marked, not sequences: who comes upon them by a prefix hit has the same gap, and after a preemption only what
is computed again is whole. Steps with prompts always fill the proposer's cache, so what many share has no gaps. What
the next pass makes up for, the entry of a draft model's last draft, is no gap.
"""

import torch
from torch import Tensor

from rose.slots import Slots
from rose.speculation import kernels
from rose.speculation.passes import Passes, covered, open_passes
from rose.speculation.protocol import Closing, DraftRows


class KeptBlocks:
    """Of the cache beside that of `slots`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._whole = torch.zeros(slots.dummy_block + 1, dtype=torch.bool, device=slots.ids.device)

    def open(self, rows: DraftRows, num_passes: int, *, from_before: bool = False) -> Passes | None:
        """A loop of drafts, whose rows have none where there is a gap before their last token. None where every row has
        one, and nothing need be computed; never so on a GPU, which is not waited for."""
        slots = self._slots
        if not kernels.has_kernels(rows.slots):
            known = slots.num_tokens[rows.slots]
            if not covered(slots, self._whole, rows.slots, known - 1).any():
                return None
        return open_passes(slots, rows, num_passes, self._whole, from_before=from_before)

    def serves(self, step: Closing) -> bool:
        """Whether what a proposer computes of the step's tokens can be of use: some row has no gap before them. On a
        GPU, as above, always."""
        return kernels.has_kernels(step.tokens) or bool(self._covers_before(step).any())

    def close(self, step: Closing, *, filled: bool) -> None:
        """The step's tokens have entries (`filled`), or not."""
        if kernels.has_kernels(step.tokens):
            self._close(step, filled=filled)
            return
        blocks = step.inputs.paged.slot_mapping // self._slots.block_size
        self._whole[blocks] = self._covers_before(step)[step.inputs.spans.rows] if filled else False

    def close_with(self, step: Closing, recycled: Tensor, hidden: Tensor) -> None:
        """The same, filled; and hidden[slot] ([S + 1, H]) of each row becomes what `recycled` ([T, H]) has at the last
        of its tokens that counts: the last of a prompt's chunk, or the last accepted."""
        if kernels.has_kernels(step.tokens):
            self._close(step, filled=True, states=(recycled, hidden))
            return
        last = step.inputs.paged.cu_seqlens_q[:-1] + num_kept(step) - 1
        hidden[step.inputs.slots] = recycled[last]
        self.close(step, filled=True)

    def _close(self, step: Closing, *, filled: bool, states: tuple[Tensor, Tensor] | None = None) -> None:
        from rose.kernels.draft_rows import close_rows

        paged = step.inputs.paged
        close_rows(
            self._slots,
            self._whole,
            step.inputs.slots,
            (paged.cu_seqlens_q, paged.kv_lengths, paged.slot_mapping),
            filled=filled,
            kept=(step.num_given.contiguous(), step.num_new.contiguous()),
            states=states,
        )

    def _covers_before(self, step: Closing) -> Tensor:
        paged = step.inputs.paged
        return covered(self._slots, self._whole, step.inputs.slots, paged.kv_lengths - paged.cu_seqlens_q.diff())


def num_kept(step: Closing) -> Tensor:
    """int32 [R]: of each row's tokens in the step those that count."""
    return torch.where(step.num_given > 0, step.num_given, step.num_new)
