"""What the device knows of every sequence: ids, lengths, block table. The host names slots and changes, no more.

    ids          [S + 1, width]   known tokens; behind `num_tokens`: the id a later chunk begins with, then drafts
    num_tokens   [S + 1]          known
    num_computed [S + 1]          of them with keys and values; a decoding sequence lacks its last token's
    num_prompt   [S + 1]          where output begins
    block_table  [S + 1, blocks]  what is not filled names the dummy block

All int32. Slot S is nobody's: rows that only fill up a batch name it. Width leaves room for the steps that may still be
in flight when a sequence has reached its end; nothing here is read of what they write. These are the operations in
torch, for any device; none of them waits for it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ipc.step import (
    ADMIT_INPUT_OFFSET,
    ADMIT_NUM_COMPUTED,
    ADMIT_NUM_PROMPT,
    ADMIT_SLOT,
    BLOCK_ID,
    BLOCK_INDEX,
    BLOCK_SLOT,
)
from ipc.types import ModelFacts
from rose.attention.paged import PagedRows


class Spans(NamedTuple):
    """Which of a step's T tokens belong to which of its R rows."""

    cu_seqlens: Tensor  # int32 [R + 1]
    rows: Tensor  # int64 [T]
    offsets: Tensor  # int64 [T], from 0 in each row


class RowInputs(NamedTuple):
    """What the model reads of R rows with T tokens in all, and its attention."""

    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T], below max_model_len
    paged: PagedRows
    next_ids: Tensor  # int32 [T]: the token after each; undefined after a row's last where it is not known yet
    slots: Tensor  # int32 [R]
    spans: Spans


class Slots:
    """State of `facts.max_num_seqs` sequences; `dummy_block` takes what is written past a block table."""

    def __init__(self, facts: ModelFacts, dummy_block: int, device: torch.device) -> None:
        width = facts.max_model_len + (facts.max_draft_tokens + 1) * facts.num_steps_in_flight
        num_slots, num_blocks = facts.max_num_seqs + 1, -(-width // facts.block_size)
        self.max_model_len, self.block_size, self.dummy_block = facts.max_model_len, facts.block_size, dummy_block
        self.ids = torch.zeros(num_slots, width, dtype=torch.int32, device=device)
        self.num_tokens, self.num_computed, self.num_prompt = torch.zeros(
            3, num_slots, dtype=torch.int32, device=device
        )
        self.block_table = torch.full((num_slots, num_blocks), dummy_block, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """No sequence is left: another scheduler's begin."""
        self.block_table.fill_(self.dummy_block)
        for counts in (self.num_tokens, self.num_computed, self.num_prompt):
            counts.zero_()

    # --- the tables of a step, in this order ----------------------------------------------------------------

    def release(self, slots: Tensor) -> None:
        """slots int32 [n]: empty from now on."""
        rows = slots.long()
        # filled: a number put by index is copied to the device, and waits
        self.block_table.index_fill_(0, rows, self.dummy_block)
        self.num_tokens.index_fill_(0, rows, 0)
        self.num_computed.index_fill_(0, rows, 0)

    def admit(self, admissions: Tensor, hits: Spans, input_ids: Tensor) -> None:
        """admissions int32 [n, 8] (columns: ipc.step), whose prefix hits lie in `input_ids` as `hits` says."""
        slots, num_computed = admissions[:, ADMIT_SLOT], admissions[:, ADMIT_NUM_COMPUTED]
        self.num_prompt[slots] = admissions[:, ADMIT_NUM_PROMPT]
        self.num_tokens[slots] = num_computed
        self.num_computed[slots] = num_computed
        sources = admissions[:, ADMIT_INPUT_OFFSET][hits.rows] + hits.offsets
        self.ids[slots[hits.rows], hits.offsets] = input_ids[sources]

    def extend(self, new_blocks: Tensor) -> None:
        """new_blocks int32 [n, 3] (columns: ipc.step): entries of block tables."""
        self.block_table[new_blocks[:, BLOCK_SLOT], new_blocks[:, BLOCK_INDEX]] = new_blocks[:, BLOCK_ID]

    # --- before and after the forward pass ------------------------------------------------------------------

    def append_prompt(self, slots: Tensor, given: Spans, sources: Tensor, input_ids: Tensor) -> None:
        """Ids of prefill rows (slots [n]) to behind the computed ones: those `given` from `sources` (int32 [n]) on."""
        starts = self.num_computed[slots]
        places = (starts[given.rows] + given.offsets).clamp_(max=self.ids.shape[1] - 1)
        self.ids[slots[given.rows], places] = input_ids[sources[given.rows] + given.offsets]

    def inputs(self, slots: Tensor, spans: Spans, max_q_len: int, max_kv_len: int) -> RowInputs:
        """The step's rows (slots int32 [R]): each computes its tokens behind the computed ones. Every kind of row is
        alike: the ids of a prefill chunk, the last token of a decode row, the drafts behind it are all in `ids`."""
        last = self.ids.shape[1] - 1
        starts, token_slots = self.num_computed[slots], slots[spans.rows]
        places = (starts[spans.rows] + spans.offsets).clamp_(max=last)
        blocks = self.block_table[token_slots, places // self.block_size]
        slot_mapping = blocks * self.block_size + places % self.block_size
        paged = PagedRows(
            cu_seqlens_q=spans.cu_seqlens,
            kv_lengths=(starts + spans.cu_seqlens.diff()).clamp_(max=last + 1),
            block_table=self.block_table[slots],
            slot_mapping=slot_mapping.int(),
            max_q_len=max_q_len,
            max_kv_len=min(max_kv_len, last + 1),
        )
        return RowInputs(
            input_ids=self.ids[token_slots, places],
            positions=places.clamp(max=self.max_model_len - 1).int(),
            paged=paged,
            next_ids=self.ids[token_slots, (places + 1).clamp_(max=last)],
            slots=slots,
            spans=spans,
        )

    def put(self, slots: Tensor, drafts: Tensor) -> None:
        """drafts int32 [R, k] to behind the known ids of slots int32 [R], which do not know them."""
        places = self.num_tokens[slots][:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        self.ids[slots[:, None], places.clamp_(max=self.ids.shape[1] - 1)] = drafts

    def advance(self, slots: Tensor, num_given: Tensor, tokens: Tensor, num_new: Tensor) -> Tensor:
        """After the step: row r has computed num_given[r] ids of a prompt chunk (0 where it decodes), and got the first
        num_new[r] of tokens[r] (int32 [R, k + 1]). Returns how many tokens each slot holds, int32 [R].

        All int32 [R]. The token got last is not computed yet; of a decoding row those before it are, and so is the one
        that was its last.
        """
        num_computed = self.num_computed[slots] + torch.where(num_given > 0, num_given, num_new)
        num_tokens = num_computed + (num_new > 0)
        places = (num_tokens - num_new)[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.ids[slots[:, None], places.clamp_(max=self.ids.shape[1] - 1)] = tokens
        self.num_computed[slots] = num_computed
        self.num_tokens[slots] = num_tokens.int()
        return self.num_tokens[slots]
