"""Where the passes of a loop of drafts lie, one token a row each: everything that follows from the slots, at once.

Caches of drafts hold entries at the positions that the target has computed, no further: a block for the newest token is
reserved by the plan that computes it. Knows no weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rose.attention.paged import PagedRows
from rose.slots import Slots
from rose.speculation import kernels
from rose.speculation.protocol import DraftRows


class Tokens(NamedTuple):
    """What a model (int32 [T] each) and its attention read of T tokens."""

    input_ids: Tensor
    positions: Tensor
    paged: PagedRows


class RowPlaces(NamedTuple):
    """Of R rows and P passes, the first at each row's last known token. All int32; the last four of each row."""

    places: Tensor  # [P, R]: of the token, below the width of the slots' ids
    kv_lengths: Tensor  # [P, R]
    slot_mapping: Tensor  # [P, R]
    next_positions: Tensor  # [P, R]: of the token after, the generator's counter
    num_output: Tensor  # [P, R]: tokens put out before that one
    last_ids: Tensor  # [R]
    limits: Tensor  # [R]: drafts that the row may have; none where the draft's cache has a gap
    block_table: Tensor  # [R, blocks]
    cu_seqlens: Tensor  # [R + 1]: of one token a row


class Passes:
    """`RowPlaces` and the bounds that the host knows."""

    def __init__(self, slots: Slots, rows: DraftRows, found: RowPlaces) -> None:
        self.found = found
        self._max_model_len, self._width = slots.max_model_len, slots.ids.shape[1]
        self._max_length = rows.max_length

    def tokens(self, ids: Tensor, ahead: int) -> Tokens:
        """Token ids int32 [R] of as many rows, `ahead` positions behind their last known token (0: that one)."""
        found = self.found
        paged = PagedRows(
            cu_seqlens_q=found.cu_seqlens,
            kv_lengths=found.kv_lengths[ahead],
            block_table=found.block_table,
            slot_mapping=found.slot_mapping[ahead],
            max_q_len=1,
            max_kv_len=min(self._max_length + ahead, self._width),
        )
        return Tokens(ids, found.places[ahead], paged)


def open_passes(slots: Slots, rows: DraftRows, num_passes: int, whole: Tensor | None) -> Passes:
    """whole bool [num_blocks + 1]: which blocks of the draft's cache have no gap (rose.speculation.kept_blocks); None:
    there are none."""
    if kernels.has_kernels(rows.slots):
        from rose.kernels.draft_rows import row_places

        found = RowPlaces(*row_places(slots, rows.slots, rows.limits, num_passes, whole))
    else:
        found = _row_places(slots, rows, num_passes, whole)
    return Passes(slots, rows, found)


def _row_places(slots: Slots, rows: DraftRows, num_passes: int, whole: Tensor | None) -> RowPlaces:
    """In torch, the reference of the kernel."""
    num_known, last = slots.num_tokens[rows.slots], slots.ids.shape[1] - 1
    ahead = torch.arange(num_passes, dtype=torch.int32, device=num_known.device)[:, None]
    places = (num_known - 1 + ahead).clamp_(0, last)
    table = slots.block_table[rows.slots]
    blocks = table.gather(1, (places // slots.block_size).long().T).T.contiguous()  # each pass is read as dense
    limits = rows.limits
    if whole is not None:
        limits = torch.where(covered(slots, whole, rows.slots, num_known - 1), limits, 0)
    return RowPlaces(
        places=places.clamp(max=slots.max_model_len - 1),
        kv_lengths=places + 1,
        slot_mapping=blocks * slots.block_size + places % slots.block_size,
        next_positions=num_known + ahead,
        num_output=num_known - slots.num_prompt[rows.slots] + ahead,
        last_ids=slots.ids[rows.slots, places[0]],
        limits=limits,
        block_table=table,
        cu_seqlens=torch.arange(len(num_known) + 1, dtype=torch.int32, device=num_known.device),
    )


def covered(slots: Slots, whole: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """bool [R]: whether the first `lengths` (int32 [R]) positions of slots `rows` (int32 [R]) have no gap."""
    table = slots.block_table[rows]
    begins = torch.arange(table.shape[1], device=rows.device) * slots.block_size
    return (whole[table] | (begins >= lengths[:, None])).all(1)
