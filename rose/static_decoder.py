"""A language model's decode and verify steps over static device buffers: all of one that lies between its two copies.

Only launches, sizes from the key alone: so it can be captured, drafts and their acceptance with the forward pass. Runs
on any device that Triton's kernels run on. What the rows' sampling needs is part of the key, so that a step of greedy
rows does greedy work only. rose.decoder is the reference.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ipc.step import GEN_DRAFT_LENGTH, GEN_SLOT
from rose.attention.interface import Attend
from rose.attention.paged import PagedRows
from rose.decode_buffers import DecodeBuffers
from rose.decoder import LanguageModel
from rose.distributed.agreement import Agreement
from rose.generate_outputs import Decision
from rose.graph_policy import GraphKey
from rose.kernels.slot_rows import DecodeRows, advance_rows, mark_non_finite, slot_rows
from rose.residents import Residents
from rose.sampling.params import Needs
from rose.slots import RowInputs, Spans
from rose.speculation.accept import Places, count_output, verify
from rose.speculation.protocol import Closing, DraftRows, Drafts, Proposer


class DecodeBatch(NamedTuple):
    """What the model reads."""

    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]


class _Forwarded(NamedTuple):
    """A step that has come to its logits."""

    drafts: Drafts
    hidden: Tensor  # [T, H]
    logits: Tensor  # float32 [T, V]


_FORWARD = "forward"  # in a key: its steps stop at the logits
_LAPSE = "lapse"  # the proposer keeps nothing of its steps


def decode_key(
    num_rows: int,
    attention: str,
    needs: Needs,
    *,
    draft_length: int = 0,
    keep_draft: bool = True,
    stops: bool = False,
) -> GraphKey:
    """Of steps with so many rows, padded ones included, and drafts for each. One that `stops` at its logits needs no
    more than its drafts do."""
    q = draft_length + 1
    names = [name for name, needed in needs._asdict().items() if needed and not (stops and q == 1)]
    names += [_FORWARD] * stops + [_LAPSE] * (not keep_draft)
    return GraphKey("verify" if draft_length else "decode", num_rows, num_rows * q, q, "+".join((attention, *names)))


def attention_of(key: GraphKey) -> str:
    return key.backend.partition("+")[0]


def needs_of(key: GraphKey) -> Needs:
    """Raises TypeError for a need that is not known."""
    names = [name for name in key.backend.split("+")[1:] if name not in (_FORWARD, _LAPSE)]
    return Needs(**dict.fromkeys(names, True))


def stops(key: GraphKey) -> bool:
    return _FORWARD in key.backend.split("+")


def keeps_draft(key: GraphKey) -> bool:
    return _LAPSE not in key.backend.split("+")


class StaticDecoder:
    """Steps of sequences that all are past their prompts."""

    def __init__(
        self,
        model: LanguageModel,
        residents: Residents,
        buffers: DecodeBuffers,
        agreement: Agreement,
        proposer: Proposer,
    ) -> None:
        self._model = model
        self._agreement = agreement
        self._residents = residents
        self._buffers = buffers
        self._proposer = proposer
        self._forwarded: dict[GraphKey, _Forwarded] = {}  # of steps that stop there
        self._spans: dict[tuple[int, int], Spans] = {}  # of so many rows with as many tokens each: constants

    def paged_rows(self, key: GraphKey) -> PagedRows:
        """Where attention reads what a step of `key` is made of; filled by `forward`."""
        rows = self._buffers.rows(key)
        max_kv_len = self._residents.slots.ids.shape[1]
        return PagedRows(
            rows.cu_seqlens_q, rows.kv_lengths, rows.block_table, rows.slot_mapping, max_q_len=key.q,
            max_kv_len=max_kv_len,
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, key: GraphKey, attend: Attend) -> None:
        """Enqueues a step: from the buffers' table and the slots to the slots and the buffers' outputs."""
        rows = self._buffers.rows(key)
        drafts = self._propose(key, rows)
        slot_rows(self._residents.slots, rows, drafts.tokens)
        hidden = cast(nn.Module, self._model)(DecodeBatch(rows.input_ids, rows.positions), attend)
        logits = self._model.logits(hidden)
        mark_non_finite(logits, rows.status)
        step = _Forwarded(drafts, hidden, logits)
        if stops(key):
            self._forwarded[key] = step  # of a graph: where every replay leaves them
        else:
            self._finish(key, step, needs_of(key), None)

    def drafts(self, key: GraphKey) -> NDArray[np.int32]:
        """Of the last step of `key`, which has stopped at its logits: [R, k]. Waits for the device."""
        return self._forwarded[key].drafts.tokens.numpy(force=True)

    @torch.inference_mode()
    def finish(self, key: GraphKey, needs: Needs, bitmask: Tensor | None) -> None:
        """The rest of the last step of `key`, which has stopped at its logits; bitmask int32 [T, ceil(V / 32)], the
        leader's."""
        self._finish(key, self._forwarded[key], needs, bitmask)

    def forget(self, key: GraphKey) -> None:
        """Nobody asks for the last step of `key` any more, and no graph will write to where it is."""
        self._forwarded.pop(key, None)

    def _propose(self, key: GraphKey, rows: DecodeRows) -> Drafts:
        """The leader's drafts, on every rank; their probabilities are for the leader alone."""
        length = key.q - 1
        if not length:
            return Drafts(self._buffers.zeros[: key.num_seqs, None][:, :0], self._buffers.zeros[: key.num_seqs])
        columns = rows.table.t().contiguous()
        max_length = self._residents.slots.ids.shape[1]
        drafts = self._proposer.propose(
            DraftRows(columns[GEN_SLOT], columns[GEN_DRAFT_LENGTH], length, max_length, needs_of(key))
        )
        group = self._agreement.group
        if group.size == 1:
            return drafts
        said = group.broadcast(torch.cat((drafts.tokens, drafts.counts[:, None]), 1))
        return Drafts(said[:, :-1], said[:, -1].contiguous(), drafts.probabilities)

    def _finish(self, key: GraphKey, step: _Forwarded, needs: Needs, bitmask: Tensor | None) -> None:
        rows, sampler = self._buffers.rows(key), self._residents.sampler
        places = Places(rows.place_slots, rows.place_positions, rows.place_outputs, self._spans_of(key))
        decision = self._agreement.decision(
            lambda: self._decide(key, step, places, needs, bitmask), num_rows=key.num_seqs, width=key.q
        )
        given, keep_draft = self._buffers.zeros[: key.num_seqs], keeps_draft(key)
        inputs = self._inputs(key, rows)
        self._proposer.accepted(Closing(inputs, step.hidden, decision.tokens, decision.num_new, given, keep_draft))
        if key.q > 1:
            count_output(sampler, places, decision.tokens, decision.num_new, needs)
        else:
            sampler.count(rows.slots, decision.tokens.flatten(), needs)
        advance_rows(
            self._residents.slots, rows, decision.tokens, decision.num_new, decision.num_drafts,
            self._buffers.row_outputs(key.num_seqs),
        )  # fmt: skip

    def _decide(
        self, key: GraphKey, step: _Forwarded, places: Places, needs: Needs, bitmask: Tensor | None
    ) -> Decision:
        """Rows' statuses are not in it: they follow from their places' and go to the leader's answer alone."""
        sampler, drafts = self._residents.sampler, step.drafts
        if key.q > 1:
            tokens, num_new = verify(sampler, step.logits, places, *drafts, needs=needs, bitmask=bitmask)
        else:
            drawn = sampler.draw(
                step.logits, places.slots, places.positions, places.num_output, needs=needs, bitmask=bitmask
            )
            tokens, num_new = drawn[:, None], self._buffers.ones[: key.num_seqs]
        if needs.logprobs:
            self._write_logprobs(key, *sampler.logprobs(step.logits, tokens.flatten()))
        return Decision(self._buffers.zeros[: key.num_seqs], tokens, num_new, drafts.counts, None)

    def _inputs(self, key: GraphKey, rows: DecodeRows) -> RowInputs:
        return RowInputs(
            rows.input_ids, rows.positions, self.paged_rows(key), rows.next_ids, rows.slots, self._spans_of(key)
        )  # fmt: skip

    def _spans_of(self, key: GraphKey) -> Spans:
        size = key.num_seqs, key.q
        if size not in self._spans:
            device = self._buffers.table.device
            grid = torch.zeros(size, dtype=torch.int64, device=device)
            rows, offsets = (grid + torch.arange(size[axis], device=device).unsqueeze(1 - axis) for axis in (0, 1))
            self._spans[size] = Spans(self._buffers.rows(key).cu_seqlens_q, rows.flatten(), offsets.flatten())
        return self._spans[size]

    def _write_logprobs(self, key: GraphKey, logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> None:
        """[T], [T, M] twice; a small vocabulary has fewer than a slot has room for."""
        buffers, num_rows, q, num_top = self._buffers, key.num_seqs, key.q, top_ids.shape[1]
        buffers.logprobs[:num_rows, :q] = logprobs.view(num_rows, q)
        buffers.top_ids[:num_rows, :q, :num_top] = top_ids.view(num_rows, q, num_top)
        buffers.top_logprobs[:num_rows, :q, :num_top] = top_logprobs.view(num_rows, q, num_top)
