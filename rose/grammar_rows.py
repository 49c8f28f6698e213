"""Rows of a step whose sequences follow a grammar: what they may go on with, and what they went on with.

Needs the CPU between two steps of one sequence: a mask follows from the token before. Free of torch.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ipc.step import GEN_INPUT_OFFSET, GEN_MAX_LENGTH, GEN_SLOT, STATUS_OK
from rose.batch import Int32s
from rose.generate_batch import GenerateRows
from rose.host_slots import HostSlots, Occupant
from rose.sampling.grammar import GrammarError, Grammars


class GrammarRows:
    """Matchers by slot, in step with the tokens there. A sequence whose grammar fails does so alone, by its status."""

    def __init__(self, grammars: Grammars, host: HostSlots, vocab_size: int) -> None:
        self._grammars = grammars
        self._host = host
        self._mask_words = -(-vocab_size // 32)

    def enter(self, occupant: Occupant, ids: Int32s) -> None:
        """A sequence enters a slot; `ids` are its prefix hits."""
        slot, params = occupant
        self._grammars.release(slot)  # of whoever was there
        if params.grammar is None:
            return
        try:
            self._grammars.admit(slot, params.grammar)
            self._grammars.accept(slot, ids[self._host.num_prompt[slot] :].tolist())
        except GrammarError as error:
            self._host.fail(slot, error)

    def has_any(self, slots: Iterable[int]) -> bool:
        """Whether some row needs its mask: then this step waits for the tokens of the one before."""
        return any(slot in self._grammars for slot in slots)

    def masks(self, rows: GenerateRows, drafts: NDArray[np.int32] | None = None) -> NDArray[np.int32] | None:
        """int32 [N, ceil(V / 32)], a bit for each token that may come; None where no row has a grammar. A line for each
        row, and behind it one for each of its `drafts` [R, k] (rows.num_drafts): as if they and those before it came.

        Output of an earlier life, which prefill rows bring, is accepted first. Sets the status of rows that fail.
        """
        if not self.has_any(rows.slots.tolist()):
            return None
        for row in np.flatnonzero(rows.num_given).tolist():
            self._accept_given(rows, row)
        masks = np.empty((len(rows.slots), self._mask_words), np.int32)
        for failed, error in self._grammars.fill(masks, rows.slots.tolist()).items():
            self._fail(rows, failed, error)
        masks[rows.status != STATUS_OK] = -1  # nobody asks, but something must be allowed
        return masks if drafts is None or not rows.num_drafts.any() else self._behind(rows, drafts, masks)

    def accept(self, rows: GenerateRows, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """The tokens that sampling rows got: the first counts[r] of tokens[r]."""
        for row in np.flatnonzero(rows.samples & (rows.status == STATUS_OK)).tolist():
            try:
                self._grammars.accept(int(rows.slots[row]), tokens[row][: counts[row]])
            except GrammarError as error:
                self._fail(rows, row, error)

    def _behind(self, rows: GenerateRows, drafts: NDArray[np.int32], first: NDArray[np.int32]) -> NDArray[np.int32]:
        """`first` [R, words] with the lines of drafts. One that the grammar does not allow, and any behind it, may be
        followed by anything: they are never taken."""
        starts = np.concatenate(([0], np.cumsum(rows.num_drafts[:-1] + 1)))
        masks = np.full((int(rows.num_drafts.sum()) + len(first), self._mask_words), -1, np.int32)
        masks[starts] = first
        for row in np.flatnonzero(rows.num_drafts).tolist():
            slot, line = int(rows.slots[row]), int(starts[row])
            if slot in self._grammars and rows.status[row] == STATUS_OK:
                ids = drafts[row, : rows.num_drafts[row]].tolist()
                self._grammars.fill_ahead(masks[line : line + len(ids) + 1], slot, ids)
        return masks

    def _accept_given(self, rows: GenerateRows, row: int) -> None:
        """Output among the row's ids, but for what the grammar met in a step that then did not fit."""
        line, host = rows.table[row], self._host
        slot, begin, end = int(line[GEN_SLOT]), int(line[GEN_INPUT_OFFSET]), int(line[GEN_MAX_LENGTH])
        count = int(rows.num_given[row])
        num_new = max(0, min(count, end - max(int(host.num_prompt[slot]), int(host.num_met[slot]))))
        host.num_met[slot] = max(end, int(host.num_met[slot]))
        try:
            self._grammars.accept(slot, rows.input_ids[begin + count - num_new : begin + count].tolist())
        except GrammarError as error:
            self._fail(rows, row, error)

    def _fail(self, rows: GenerateRows, row: int, error: GrammarError) -> None:
        slot = int(rows.slots[row])
        if self._host.status[slot] == STATUS_OK:  # else it has been told
            self._host.fail(slot, error)
        rows.status[row] = self._host.status[slot]
