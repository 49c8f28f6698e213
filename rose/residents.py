"""The sequences in a rank's slots: what device, host, sampler and grammars keep of each, changed together.

Everything here is host work and launches on small tensors; the model is elsewhere.
"""

from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.step import (
    ADMIT_INPUT_OFFSET,
    ADMIT_NUM_COMPUTED,
    ADMIT_SLOT,
    GEN_INPUT_OFFSET,
    RELEASE_SLOT,
    StepPlan,
)
from ipc.step_ring import Arrays
from ipc.types import ModelFacts
from rose.batch import Int32s
from rose.generate_batch import GenerateRows, spans
from rose.grammar_rows import GrammarRows
from rose.host_slots import HostSlots, Occupant
from rose.lazy_tensor import as_step_error
from rose.runner import OutOfMemory
from rose.sampling.grammar import Grammars
from rose.sampling.params import UnusableParams
from rose.sampling.sampler import Sampler
from rose.slots import RowInputs, Slots
from rose.speculation.accept import NO_SLOT, Places, count_output


class Residents:
    """State of `facts.max_num_seqs` slots; `facts.num_blocks` is the dummy block.

    `tokenizer` is the model's tokenizer.json, read when the first grammar comes: in the warm-up.
    """

    def __init__(self, facts: ModelFacts, device: torch.device, tokenizer: Path) -> None:
        self._device = device
        self._vocab_size = facts.vocab_size
        self.slots = Slots(facts, facts.num_blocks, device)
        self.host = HostSlots(facts.max_num_seqs)
        self.sampler = Sampler(
            max_num_seqs=facts.max_num_seqs,
            vocab_size=facts.vocab_size,
            max_logprobs=facts.max_logprobs,
            eos_token_ids=facts.eos_token_ids,
            device=device,
        )
        grammars = Grammars(tokenizer, facts.vocab_size, facts.eos_token_ids)
        self.grammars = GrammarRows(grammars, self.host, facts.vocab_size)

    def clear(self) -> None:
        """Nobody is left."""
        self.slots.clear()
        self.host.clear()

    # --- the tables of a plan -------------------------------------------------------------------------------

    def apply_tables(self, plan: StepPlan, arrays: Arrays) -> None:
        """Releases, admissions, new blocks, in this order. Slots named wrongly are a fault of the scheduler."""
        newcomers = self.host.apply(plan, arrays)
        if plan.num_releases:
            self.slots.release(self.tensor(arrays["releases"][: plan.num_releases, RELEASE_SLOT]))
        if newcomers:
            self._admit(newcomers, cast(Int32s, arrays["admissions"][: len(newcomers)]), arrays)
        if plan.num_new_blocks:
            self.slots.extend(self.tensor(arrays["new_blocks"][: plan.num_new_blocks]))

    def _admit(self, newcomers: list[Occupant], table: Int32s, arrays: Arrays) -> None:
        hits = spans(table[:, ADMIT_NUM_COMPUTED], self._device)
        num_ids = int((table[:, ADMIT_INPUT_OFFSET] + table[:, ADMIT_NUM_COMPUTED]).max())
        ids = cast(Int32s, arrays["input_ids"][:num_ids].clip(0, self._vocab_size - 1))
        self.slots.admit(self.tensor(table), hits, self.tensor(ids))
        for occupant, line in zip(newcomers, table, strict=True):
            begin = line[ADMIT_INPUT_OFFSET]
            self.grammars.enter(occupant, ids[begin : begin + line[ADMIT_NUM_COMPUTED]])
            self._admit_to_sampling(occupant)
        if self.sampler.needs([slot for slot, _ in newcomers]).penalties:
            self._observe(self.tensor(table[:, ADMIT_SLOT])[hits.rows], hits.offsets)

    def _admit_to_sampling(self, occupant: Occupant) -> None:
        try:
            self.sampler.admit(*occupant)
        except UnusableParams as error:
            self.host.fail(occupant.slot, error)
        except (RuntimeError, MemoryError) as error:
            if not isinstance(as_step_error(error), OutOfMemory):
                raise
            # the tables of a plan must hold: this sequence alone can do without them
            self.host.fail(occupant.slot, UnusableParams(f"no memory to count tokens for penalties: {error}"))

    # --- the rows of a plan ---------------------------------------------------------------------------------

    def append_prompts(self, rows: GenerateRows) -> None:
        """The ids that prefill rows bring, behind the computed ones. No slot knows of them before `advance`."""
        prefill = np.flatnonzero(rows.num_given)
        if not len(prefill):
            return
        brought = spans((rows.num_given + ~rows.samples)[prefill], self._device)
        table = rows.table[prefill]
        self.slots.append_prompt(
            self.tensor(rows.slots[prefill]),
            brought,
            self.tensor(table[:, GEN_INPUT_OFFSET]),
            self.tensor(rows.input_ids),
        )

    def put_drafts(self, slots: Tensor, drafts: Tensor) -> None:
        """slots int32 [R], drafts int32 [R, k]: behind the known ids. No slot knows of them before `advance`."""
        self.slots.put(slots, drafts)

    def places(self, rows: GenerateRows, inputs: RowInputs) -> tuple[Places, Tensor]:
        """Where the step may draw tokens, N in all, and which of its tokens each follows, int64 [N]."""
        each = spans(rows.num_drafts + 1, self._device)
        first_last = (inputs.paged.cu_seqlens_q[1:] - 1 - each.cu_seqlens.diff() + 1)[each.rows]
        slots = torch.where(self.tensor(rows.samples), inputs.slots, NO_SLOT)
        before = inputs.paged.kv_lengths - self.tensor(rows.num_drafts)  # tokens before a row's first place
        positions = before[each.rows] + each.offsets
        num_output = positions - self.slots.num_prompt[inputs.slots][each.rows]
        return Places(slots[each.rows], positions.int(), num_output.int(), each), first_last + each.offsets

    def inputs(self, rows: GenerateRows) -> RowInputs:
        each = spans(np.diff(rows.cu_seqlens), self._device)
        return self.slots.inputs(self.tensor(rows.slots), each, rows.max_q_len, rows.max_kv_len)

    def observe_prompts(self, rows: GenerateRows, inputs: RowInputs) -> None:
        """Counts what prefill rows computed, where a penalty asks how often a token was there.

        But for what was counted in a step that then did not fit.
        """
        if not self.sampler.needs(rows.slots[rows.num_given > 0].tolist()).penalties:
            return
        tokens, token_rows, positions = rows.given
        slots = rows.slots[token_rows]
        new = self.tensor(tokens[positions >= self.host.num_counted[slots]])
        self._observe(inputs.slots[inputs.spans.rows[new]], inputs.positions[new])
        np.maximum.at(self.host.num_counted, slots, positions + 1)

    def wants_prompt_logprobs(self, rows: GenerateRows) -> NDArray[np.int64]:
        """Which of the step's tokens answer how likely the next one was: all of a prompt's whose params ask."""
        asks = np.zeros(len(rows.slots), np.bool_)
        for row in np.flatnonzero(rows.num_given):
            params = self.host.params[rows.slots[row]]
            asks[row] = params is not None and params.prompt_logprobs is not None
        return np.flatnonzero(np.repeat(asks, np.diff(rows.cu_seqlens)))

    def count_output(self, rows: GenerateRows, places: Places, tokens: Tensor, num_new: Tensor) -> None:
        """New tokens, for penalties: tokens int32 [R, k + 1], of which the first `num_new` count."""
        needs = self.sampler.needs(rows.slots[rows.samples].tolist())
        count_output(self.sampler, places, tokens, num_new, needs)

    def advance(self, rows: GenerateRows, inputs: RowInputs, tokens: Tensor, num_new: Tensor) -> Tensor:
        """The step is over: see Slots.advance."""
        return self.slots.advance(inputs.slots, self.tensor(rows.num_given), tokens, num_new)

    def tensor(self, array: NDArray[np.generic]) -> Tensor:
        """On the device; shares memory where that is the host's."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def _observe(self, slots: Tensor, positions: Tensor) -> None:
        """slots, positions [n] of tokens whose ids are known."""
        ids, is_output = self.slots.ids[slots, positions], positions >= self.slots.num_prompt[slots]
        self.sampler.observe(slots, ids, is_output.int())
