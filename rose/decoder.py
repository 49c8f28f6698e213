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
from rose.generate_batch import GenerateRows, read_rows
from rose.generate_outputs import Decision, Logprobs, write_outputs, write_prompt_logprobs
from rose.lazy_tensor import as_step_error
from rose.residents import Residents
from rose.runner import OutOfMemory
from rose.slots import RowInputs

PADDING = -1  # a slot that sampling leaves alone
PROMPT_LOGPROB_TOKENS = 128  # whose logits are there at a time: 78 MB at a vocabulary of 152 k


class LanguageModel(Protocol):
    def __call__(self, batch: RowInputs, attend: Attend) -> Tensor:
        """Hidden states [T, H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, V]."""


class Proposer(Protocol):
    """Who drafts tokens for verify rows."""

    def propose(self, rows: GenerateRows) -> None:
        """Opens a step: drafts to behind the known ids of its verify rows."""

    def accepted(self, inputs: RowInputs, hidden: Tensor, decision: Decision) -> None:
        """Closes it: hidden states [T, H] of all its tokens, and which tokens came of them."""


class NoDrafts:
    """Generation without speculation."""

    def propose(self, rows: GenerateRows) -> None:
        """Nothing is drafted."""

    def accepted(self, inputs: RowInputs, hidden: Tensor, decision: Decision) -> None:
        """Nothing is carried over."""


class DecoderParts(NamedTuple):
    """A loaded model, its cache, and what reads that."""

    model: LanguageModel
    caches: Sequence[PagedKV]
    attention: PagedBackend


class Decoder:
    """One model and the sequences in its slots."""

    def __init__(
        self, parts: DecoderParts, residents: Residents, facts: ModelFacts, proposer: Proposer | None = None
    ) -> None:
        self._model, self._caches, self._attention = parts
        self._residents = residents
        self._facts = facts
        self._proposer = proposer or NoDrafts()
        self._failed_step = 0  # the newest that ran out of memory

    def clear(self) -> None:
        """Another scheduler begins: every slot is empty."""
        self._residents.clear()
        self._failed_step = 0

    def run(self, plan: StepPlan, arrays: Arrays) -> None:
        """One step from its slot's inputs to its outputs. Raises OutOfMemory: the tables hold, the rows did nothing."""
        self._residents.apply_tables(plan, arrays)
        if plan.last_applied < self._failed_step:
            raise OutOfMemory(f"planned on top of step {self._failed_step}, which did not fit")
        if not plan.num_seqs:
            return
        rows = read_rows(plan, arrays, self._facts, self._residents.host)
        try:
            self._generate(rows, arrays)
        except (RuntimeError, MemoryError) as error:
            if isinstance(as_step_error(error), OutOfMemory):
                self._failed_step = plan.step
            raise

    def _generate(self, rows: GenerateRows, arrays: Arrays) -> None:
        """One step of rows: propose, forward, sample or accept, accepted. Up to `advance` no sequence has changed, but
        for what sampling knows of prompts: residents remember how far."""
        residents = self._residents
        residents.append_prompts(rows)
        self._proposer.propose(rows)
        inputs = residents.inputs(rows)
        hidden = self._model(inputs, self._attention.paged(inputs.paged, self._caches))
        self._write_prompt_logprobs(rows, inputs, hidden, arrays)
        decision = self._sample(rows, inputs, hidden)
        lengths = residents.advance(rows, inputs, decision.tokens, decision.num_new)
        self._proposer.accepted(inputs, hidden, decision)
        write_outputs(decision, lengths, arrays)
        if residents.grammars.has_any(rows.slots.tolist()):
            residents.grammars.accept(rows, decision.tokens[:, 0].tolist())

    def _sample(self, rows: GenerateRows, inputs: RowInputs, hidden: Tensor) -> Decision:
        """A token for every row that asks for one; the others take part as padding."""
        residents, slots = self._residents, inputs.slots
        logits = self._model.logits(hidden[inputs.paged.cu_seqlens_q[1:] - 1])
        masks = residents.grammars.masks(rows)
        asks = residents.tensor(rows.samples)
        status = residents.tensor(rows.status)
        finite = logits.sum(dim=1).isfinite()  # a sum of finite logits is finite
        status = torch.where((status == STATUS_OK) & asks & ~finite, STATUS_NON_FINITE, status)
        residents.observe_prompts(rows, inputs)
        positions = inputs.paged.kv_lengths
        draws = residents.sampler.sample(
            logits,
            torch.where(asks, slots, PADDING),
            positions,
            positions - residents.slots.num_prompt[slots],
            needs=residents.sampler.needs(rows.slots[rows.samples].tolist()),
            bitmask=None if masks is None else residents.tensor(masks),
        )
        columns = [part[:, None] for part in draws[1:] if part is not None]
        logprobs = Logprobs(*columns) if columns else None
        return Decision(status, draws.tokens[:, None], asks.int(), torch.zeros_like(status), logprobs)

    def _write_prompt_logprobs(self, rows: GenerateRows, inputs: RowInputs, hidden: Tensor, arrays: Arrays) -> None:
        """A line for every token of the prompts that ask for it."""
        wanted = self._residents.wants_prompt_logprobs(rows)
        if not len(wanted):
            return
        assert len(wanted) <= MAX_PROMPT_LOGPROBS, f"{len(wanted)} prompt logprobs in a step: plan fewer"
        for begin in range(0, len(wanted), PROMPT_LOGPROB_TOKENS):
            tokens = self._residents.tensor(wanted[begin : begin + PROMPT_LOGPROB_TOKENS])
            logits = self._model.logits(hidden[tokens])
            found = self._residents.sampler.prompt_logprobs(logits, inputs.next_ids[tokens])
            write_prompt_logprobs(begin, Logprobs(*found), arrays)
