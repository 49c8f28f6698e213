"""Generation steps in torch's own operators: what runs on CPU, and the reference of what runs on a GPU.

The plan's tables, then its rows (`_generate`), then their outputs into the slot. Steps come in order, one at a time;
knows neither processes nor threads.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ipc.step import STATUS_NON_FINITE, STATUS_OK, StepPlan
from ipc.step_ring import MAX_PROMPT_LOGPROBS, Arrays
from ipc.types import ModelFacts
from rose.attention.interface import Attend
from rose.attention.paged import PagedBackend, PagedKV
from rose.distributed.agreement import Agreement
from rose.distributed.group import ALONE, Group
from rose.generate_batch import GenerateRows, read_rows
from rose.generate_outputs import Decision, Logprobs, write_outputs, write_prompt_logprobs
from rose.lazy_tensor import as_step_error
from rose.residents import Residents
from rose.runner import OutOfMemory
from rose.slots import RowInputs
from rose.speculation.accept import Places, at_places, by_rows, verify
from rose.speculation.no_drafts import NoDrafts
from rose.speculation.protocol import Closing, DraftRows, Drafts, Proposer

PROMPT_LOGPROB_TOKENS = 128  # whose logits are there at a time: 78 MB at a vocabulary of 152 k


class LanguageModel(Protocol):
    def __call__(self, batch: RowInputs, attend: Attend) -> Tensor:
        """Hidden states [T, H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, V]."""


class DecoderParts(NamedTuple):
    """A loaded model, its cache, and what reads that."""

    model: LanguageModel
    caches: Sequence[PagedKV]
    attention: PagedBackend


class Decoder:
    """One model and the sequences in its slots."""

    def __init__(
        self,
        parts: DecoderParts,
        residents: Residents,
        facts: ModelFacts,
        proposer: Proposer | None = None,
        group: Group = ALONE,
    ) -> None:
        self._model, self._caches, self._attention = parts
        self._residents = residents
        self._facts = facts
        self._proposer = proposer or NoDrafts()
        self._group = group
        self.agreement = Agreement(group, residents.slots)
        self._failed_step = 0  # the newest that ran out of memory

    def clear(self) -> None:
        """Another scheduler begins: every slot is empty."""
        self._residents.clear()
        self._failed_step = 0

    def run(self, plan: StepPlan, arrays: Arrays) -> None:
        """One step from its slot's inputs to its outputs. Raises OutOfMemory: the tables hold, the rows did nothing."""
        self._residents.apply_tables(plan, arrays)
        self.agreement.check(plan, arrays)
        if plan.last_applied < self._failed_step:
            raise OutOfMemory(f"planned on top of step {self._failed_step}, which did not fit")
        if not plan.num_seqs:
            return
        rows = read_rows(plan, arrays, self._facts, self._residents.host)
        if not self._group.leads:  # the leader answers, and gives the slot back, without waiting for the others' end
            rows = rows._replace(table=rows.table.copy())
        try:
            self._generate(rows, arrays)
        except (RuntimeError, MemoryError) as error:
            if isinstance(as_step_error(error), OutOfMemory):
                self._failed_step = plan.step
            raise

    def _generate(self, rows: GenerateRows, arrays: Arrays) -> None:
        """One step of rows: propose, forward, accept, close. Up to `advance` no sequence has changed, but for what
        sampling knows of prompts: residents remember how far."""
        residents = self._residents
        residents.append_prompts(rows)
        rows, drafts = self._propose(rows)
        inputs = residents.inputs(rows)
        hidden = self._model(inputs, self._attention.paged(inputs.paged, self._caches))
        self._write_prompt_logprobs(rows, inputs, hidden, arrays)
        places, followed = residents.places(rows, inputs)
        logits = self._model.logits(hidden[followed])
        residents.observe_prompts(rows, inputs)  # on every rank, like the output below: each one drafts by them
        decision = self.agreement.decision(
            lambda: self._decide(rows, drafts, inputs, places, logits),
            num_rows=len(rows.table),
            width=rows.draft_length + 1,
        )
        close = self._proposer.prefill if rows.has_prompts else self._proposer.accepted
        given = residents.tensor(rows.num_given)
        close(Closing(inputs, hidden, decision.tokens, decision.num_new, given, rows.keep_draft))
        # late: a step that does not fit must not have counted anything
        residents.count_output(rows, places, decision.tokens, decision.num_new)
        lengths = residents.advance(rows, inputs, decision.tokens, decision.num_new)
        if self._group.leads:
            write_outputs(decision, lengths, arrays)
            if residents.grammars.has_any(rows.slots.tolist()):
                residents.grammars.accept(rows, decision.tokens.tolist(), decision.num_new.tolist())

    def _propose(self, rows: GenerateRows) -> tuple[GenerateRows, Drafts]:
        """Drafts behind the known ids, where the plan wants some; the rows are cut to what was found."""
        residents = self._residents
        slots, limits = residents.tensor(rows.slots), residents.tensor(rows.num_drafts)
        if not rows.draft_length:
            return rows, Drafts(slots.new_zeros(len(slots), 0), torch.zeros_like(slots))
        assert slots.is_cpu, "drafts come without prompts: such a step is rose.static_decoder's on a GPU"
        needs = residents.sampler.needs(rows.slots.tolist())
        drafts = self._proposer.propose(DraftRows(slots, limits, rows.draft_length, rows.max_kv_len, needs))
        said = self._group.broadcast(torch.cat((drafts.tokens, drafts.counts[:, None]), 1))
        drafts = Drafts(said[:, :-1], said[:, -1].contiguous(), drafts.probabilities)
        residents.put_drafts(slots, drafts.tokens)
        return rows.with_drafts(drafts.counts.numpy()), drafts

    def _decide(
        self, rows: GenerateRows, drafts: Drafts, inputs: RowInputs, places: Places, logits: Tensor
    ) -> Decision:
        """New tokens for every row that asks for some; the others take part as padding. logits float32 [N, V]."""
        residents = self._residents
        masks = residents.grammars.masks(rows, drafts.tokens.numpy(force=True))
        finite = logits.sum(dim=1).isfinite()  # a sum of finite logits is finite
        status, asks = residents.tensor(rows.status), residents.tensor(rows.samples)
        needs = residents.sampler.needs(rows.slots[rows.samples].tolist())
        bitmask = None if masks is None else residents.tensor(masks)
        tokens, num_new = verify(residents.sampler, logits, places, *drafts, needs=needs, bitmask=bitmask)
        num_new = num_new * asks
        kept = places.spans.offsets < num_new[places.spans.rows]
        bad = torch.zeros_like(status).index_add_(0, places.spans.rows, (kept & ~finite).int())
        status = torch.where((status == STATUS_OK) & (bad > 0), STATUS_NON_FINITE, status)
        logprobs = None
        if needs.logprobs:
            found = residents.sampler.logprobs(logits, at_places(tokens, places.spans))
            logprobs = Logprobs(*(by_rows(part, places.spans, tokens.shape[1]) for part in found))
        return Decision(status, tokens, num_new, drafts.counts, logprobs)

    def _write_prompt_logprobs(self, rows: GenerateRows, inputs: RowInputs, hidden: Tensor, arrays: Arrays) -> None:
        """A line for every token of the prompts that ask for it."""
        wanted = self._residents.wants_prompt_logprobs(rows)
        if not len(wanted):
            return
        assert len(wanted) <= MAX_PROMPT_LOGPROBS, f"{len(wanted)} prompt logprobs in a step: plan fewer"
        for begin in range(0, len(wanted), PROMPT_LOGPROB_TOKENS):
            tokens = self._residents.tensor(wanted[begin : begin + PROMPT_LOGPROB_TOKENS])
            logits = self._model.logits(hidden[tokens])
            if not self._group.leads:
                continue
            found = self._residents.sampler.logprobs(logits, inputs.next_ids[tokens])
            write_prompt_logprobs(begin, Logprobs(*found), arrays)
