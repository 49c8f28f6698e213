"""Where the passes of a loop of drafts lie, one token a row each: everything that follows from the slots, at once; and
where a pass over a step's own tokens does.

Caches of drafts hold entries at the positions that the target has computed, no further: a block for the newest token is
reserved by the plan that computes it. A loop of k drafts in k passes leaves out the last draft's entry, so if all are
accepted the last computed position lacks one. Passes over a cache with such gaps begin one token earlier, always, as
nobody on the host knows whether: where the entry was there it is written again as it was. Knows no weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rose.attention.paged import PagedRows
from rose.slots import RowInputs, Slots
from rose.speculation import kernels
from rose.speculation.protocol import DraftRows

GAP, WHOLE, LACKS_LAST = range(3)  # a block: with a gap in it or before, without, without one but for its last entry


class Tokens(NamedTuple):
    """What a model (int32 [T] each) and its attention read of T tokens."""

    input_ids: Tensor
    positions: Tensor
    paged: PagedRows


class Pairs(NamedTuple):
    """Each row's last two known tokens. All int32. Where one is known the first counts for nothing: it goes to the
    dummy block and sees no key."""

    input_ids: Tensor  # [2 R]
    positions: Tensor  # [2 R]
    slot_mapping: Tensor  # [2 R]
    cu_seqlens: Tensor  # [R + 1]: of two tokens a row


class RowPlaces(NamedTuple):
    """Of R rows and P passes, the first at each row's last known token. All int32."""

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
    """`RowPlaces` and the bounds that the host knows. With `pairs` the first pass is over two tokens a row."""

    def __init__(self, slots: Slots, rows: DraftRows, found: RowPlaces, pairs: Pairs | None) -> None:
        self.found, self._pairs = found, pairs
        self._max_model_len, self._width = slots.max_model_len, slots.ids.shape[1]
        self._max_length = rows.max_length

    def first(self) -> Tokens:
        """The last known token of each row, or the last two of each, row by row."""
        if self._pairs is None:
            return self.tokens(self.found.last_ids, 0)
        ids, positions, slot_mapping, cu_seqlens = self._pairs
        paged = self._paged(0)._replace(cu_seqlens_q=cu_seqlens, slot_mapping=slot_mapping, max_q_len=2)
        return Tokens(ids, positions, paged)

    def last_of(self, values: Tensor) -> Tensor:
        """values [T, H] of a pass: each row's last, [R, H], a view."""
        return values.view(len(self.found.last_ids), -1, values.shape[1])[:, -1]

    def tokens(self, ids: Tensor, ahead: int) -> Tokens:
        """Token ids int32 [R] of as many rows, `ahead` positions behind their last known token (0: that one)."""
        return Tokens(ids, self.found.places[ahead], self._paged(ahead))

    def _paged(self, ahead: int) -> PagedRows:
        found = self.found
        return PagedRows(
            cu_seqlens_q=found.cu_seqlens,
            kv_lengths=found.kv_lengths[ahead],
            block_table=found.block_table,
            slot_mapping=found.slot_mapping[ahead],
            max_q_len=1,
            max_kv_len=min(self._max_length + ahead, self._width),
        )


def open_passes(
    slots: Slots, rows: DraftRows, num_passes: int, whole: Tensor | None, *, from_before: bool = False
) -> Passes:
    """whole uint8 [num_blocks + 1]: what each block of the draft's cache is (rose.speculation.kept_blocks); None: there
    are no gaps. `from_before`: the first pass begins at each row's last but one known token."""
    if kernels.has_kernels(rows.slots):
        from rose.kernels.draft_rows import row_places

        places, pairs = row_places(slots, rows.slots, rows.limits, num_passes, whole, from_before=from_before)
        return Passes(slots, rows, RowPlaces(*places), Pairs(*pairs) if from_before else None)
    found = _row_places(slots, rows, num_passes, whole)
    return Passes(slots, rows, found, _pairs(slots, rows, found) if from_before else None)


def with_tokens_before(slots: Slots, inputs: RowInputs) -> Tokens:
    """A step's T tokens, then of each of its R rows the token before them, a row of its own that sees what lies before
    it: T + R tokens in 2 R rows. Where there is none before, the row's first token goes to the dummy block instead.

    Rows of their own, as those of one query are divided among programs wherever the step's other rows are long. They
    may well be read in the same pass: every layer writes its keys and values before it attends.
    """
    if kernels.has_kernels(inputs.slots):
        from rose.kernels.draft_rows import tokens_before

        found = tokens_before(slots, inputs)
    else:
        found = _tokens_before(slots, inputs)
    ids, positions, cu_seqlens, kv_lengths, table, slot_mapping = found
    paged = PagedRows(cu_seqlens, kv_lengths, table, slot_mapping, inputs.paged.max_q_len, inputs.paged.max_kv_len)
    return Tokens(ids, positions, paged)


def _tokens_before(slots: Slots, inputs: RowInputs) -> tuple[Tensor, ...]:
    """In torch, the reference of the kernel."""
    paged, num_tokens = inputs.paged, len(inputs.input_ids)
    begins = paged.kv_lengths - paged.cu_seqlens_q.diff()
    places = (begins - 1).clamp_(min=0)
    own = torch.arange(1, len(places) + 1, dtype=torch.int32, device=places.device)
    return (
        torch.cat((inputs.input_ids, slots.ids[inputs.slots, places])),
        torch.cat((inputs.positions, places.clamp(max=slots.max_model_len - 1))),
        torch.cat((paged.cu_seqlens_q, num_tokens + own)),
        torch.cat((paged.kv_lengths, places + 1)),
        torch.cat((paged.block_table, paged.block_table)),
        torch.cat((paged.slot_mapping, _mapping(slots, paged.block_table, places, begins > 0))),
    )


def _pairs(slots: Slots, rows: DraftRows, found: RowPlaces) -> Pairs:
    """In torch, the reference of the kernel."""
    num_known, size = slots.num_tokens[rows.slots], len(rows.slots)
    before = (num_known - 2).clamp_(0, slots.ids.shape[1] - 1)
    mapping = _mapping(slots, found.block_table, before, num_known > 1)
    return Pairs(
        input_ids=torch.stack((slots.ids[rows.slots, before], found.last_ids), 1).flatten(),
        positions=torch.stack((before.clamp(max=slots.max_model_len - 1), found.places[0]), 1).flatten(),
        slot_mapping=torch.stack((mapping, found.slot_mapping[0]), 1).flatten(),
        cu_seqlens=torch.arange(0, 2 * size + 2, 2, dtype=torch.int32, device=num_known.device),
    )


def _mapping(slots: Slots, table: Tensor, places: Tensor, exists: Tensor) -> Tensor:
    """int32 [R]: where entries at `places` (int32 [R]) of rows with `table` lie; the dummy block, where none exists."""
    blocks = table.gather(1, (places // slots.block_size).long()[:, None])[:, 0]
    return torch.where(
        exists, blocks * slots.block_size + places % slots.block_size, slots.dummy_block * slots.block_size
    )


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
    """bool [R]: whether the first `lengths` (int32 [R]) positions of slots `rows` (int32 [R]) have no gap but at the
    very last, which a pass that begins there makes up for. whole: as for open_passes."""
    states, lengths = whole[slots.block_table[rows]], lengths[:, None]
    begins = torch.arange(states.shape[1], device=rows.device) * slots.block_size
    fine = (states == WHOLE) | ((states == LACKS_LAST) & (begins + slots.block_size == lengths))
    return (fine | (begins >= lengths)).all(1)
