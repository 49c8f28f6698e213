"""Which blocks of a proposer's cache hold what they should: a state a block, on the device.

A decode step with `keep_draft` off computes nothing for the proposer, and leaves a gap. Blocks that a gap lies in or
before are marked, not sequences: who comes upon them by a prefix hit has the same gap, and after a preemption only what
is computed again is whole. Steps with prompts always fill the proposer's cache, so what many share has no gaps.

The entry of a draft model's last draft is made by the next pass of whoever goes on right behind it. Where that entry is
the last of a block it is no gap to them, but one to those who find, by a hit, further blocks of others behind it.
"""

import torch
from torch import Tensor

from rose.slots import Slots
from rose.speculation import kernels
from rose.speculation.passes import GAP, LACKS_LAST, WHOLE, Passes, covered, open_passes
from rose.speculation.protocol import Closing, DraftRows


class KeptBlocks:
    """Of the cache beside that of `slots`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._whole = torch.zeros(slots.dummy_block + 1, dtype=torch.uint8, device=slots.ids.device)

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

    def close(self, step: Closing, *, filled: bool, lacks_last: bool = False) -> None:
        """The step's tokens have entries (`filled`), or not; `lacks_last`: but for the last of as many drafts as the
        step has places for, if all were accepted."""
        if kernels.has_kernels(step.tokens):
            self._close(step, filled=filled, lacks_last=lacks_last)
            return
        size = self._slots.block_size
        blocks = step.inputs.paged.slot_mapping // size
        if not filled:
            self._whole[blocks] = GAP
            return
        before, covers = self._before(step), self._covers_before(step)
        ends_block = covers & (before > 0) & (before % size == 0)
        self._whole[self._slots.block_table[step.inputs.slots, (before - 1).clamp(min=0) // size][ends_block]] = WHOLE
        self._whole[blocks] = covers[step.inputs.spans.rows].to(self._whole.dtype)
        if lacks_last:
            lacks = covers & (step.num_new == step.tokens.shape[1]) & ((before + step.num_new) % size == 0)
            last = step.inputs.paged.cu_seqlens_q[:-1] + step.num_new - 1
            self._whole[blocks[last[lacks]]] = LACKS_LAST

    def close_with(self, step: Closing, recycled: Tensor, hidden: Tensor) -> None:
        """The same, filled; and hidden[slot] ([S + 1, H]) of each row becomes what `recycled` ([T, H]) has at the last
        of its tokens that counts: the last of a prompt's chunk, or the last accepted."""
        if kernels.has_kernels(step.tokens):
            self._close(step, filled=True, states=(recycled, hidden))
            return
        last = step.inputs.paged.cu_seqlens_q[:-1] + num_kept(step) - 1
        hidden[step.inputs.slots] = recycled[last]
        self.close(step, filled=True)

    def _close(
        self,
        step: Closing,
        *,
        filled: bool,
        lacks_last: bool = False,
        states: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        from rose.kernels.draft_rows import close_rows

        paged = step.inputs.paged
        close_rows(
            self._slots,
            self._whole,
            step.inputs.slots,
            (paged.cu_seqlens_q, paged.kv_lengths, paged.slot_mapping),
            filled=filled,
            num_places=step.tokens.shape[1] if lacks_last else 0,
            kept=(step.num_given.contiguous(), step.num_new.contiguous()),
            states=states,
        )

    def _covers_before(self, step: Closing) -> Tensor:
        return covered(self._slots, self._whole, step.inputs.slots, self._before(step))

    @staticmethod
    def _before(step: Closing) -> Tensor:
        """int32 [R]: tokens of each row that were computed before the step."""
        return step.inputs.paged.kv_lengths - step.inputs.paged.cu_seqlens_q.diff()


def num_kept(step: Closing) -> Tensor:
    """int32 [R]: of each row's tokens in the step those that count."""
    return torch.where(step.num_given > 0, step.num_given, step.num_new)
