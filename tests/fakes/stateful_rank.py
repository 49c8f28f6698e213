"""A torch-free rank with the state of a real one: slots, ids, block tables and a paged cache that is really read.

The "model": a token at a position leaves one number in the cache; attention is the sum of the numbers of all
positions, read through the block table; the next token is a hash of that sum. So the next token depends on every
token before it, and a lost, foreign or overwritten cache entry changes what comes out. It checks what a rank can
see of the contract by `assert`, and knows nothing of the planner.
"""

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from ipc import step as columns
from ipc.step import (
    KIND_PREFILL,
    KIND_VERIFY,
    STATUS_BAD_PARAMS,
    STATUS_BAD_TOKEN,
    STATUS_NON_FINITE,
    STATUS_OK,
    StepFailed,
    StepPlan,
    StepResult,
)
from ipc.step_ring import Arrays
from ipc.types import FinishReason, ModelFacts, SamplingParams

MASK = (1 << 64) - 1
POISON_SEED = 666  # a sequence with this seed gives no finite token
UNUSABLE_SEED = 667  # … cannot be followed
_params = msgspec.msgpack.Decoder(SamplingParams)


def mark(token: int, position: int) -> int:
    """What `token` at `position` leaves in the cache: 64 well mixed bits."""
    x = (token * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 1) & MASK
    x = ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & MASK
    return x ^ (x >> 32)


def next_token(total: int, seed: int, vocab_size: int) -> int:
    """The token after a sequence whose marks add up to `total`."""
    x = ((total + seed) * 0x94D049BB133111EB) & MASK
    return (x >> 33) % vocab_size


def reference(prompt: list[int], params: SamplingParams, facts: ModelFacts) -> tuple[list[int], FinishReason]:
    """The tokens that the model gives for this prompt alone, and why they end."""
    total, tokens, seed = 0, list[int](), params.seed or 0
    for position, token in enumerate(prompt):
        total = (total + mark(token, position)) & MASK
    while True:
        token = next_token(total, seed, facts.vocab_size)
        tokens.append(token)
        is_stop = token in params.stop_token_ids or (token in facts.eos_token_ids and not params.ignore_eos)
        if is_stop and len(tokens) > params.min_tokens:
            return tokens, "stop"
        if len(tokens) == params.max_tokens:
            return tokens, "length"
        total = (total + mark(token, len(prompt) + len(tokens) - 1)) & MASK


def prompt_logprob(token: int, total: int) -> float:
    """A figure that depends on the token and on what is before it; exact in float32."""
    return -float((token + total) % 4096)


Lines = list[tuple[int, float]]  # of prompt logprobs: (the token that follows, its logprob)


@dataclass(slots=True)
class Slot:
    """One sequence on the device. `num_tokens` ids are known, `num_computed` of them have cache entries."""

    generation: int
    num_prompt: int
    params: SamplingParams
    num_tokens: int
    num_computed: int
    blocks: list[int] = field(default_factory=list)


class StatefulRank:
    """`acceptance` is the chance that a draft is right, `oom` that a step fails; both from a seeded generator.

    Steps that bring more than `oom_over` ids fail, too.
    """

    def __init__(
        self, facts: ModelFacts, epoch: int, seed: int, acceptance: float, oom: float, oom_over: int = 1 << 30
    ) -> None:
        self.facts = facts
        self.epoch = epoch
        self.num_dummy_writes = self.num_induced_failures = 0
        width = facts.max_model_len + (facts.max_draft_tokens + 1) * facts.num_steps_in_flight
        self.ids = np.zeros((facts.max_num_seqs, width), np.int32)
        self.slots: list[Slot | None] = [None] * facts.max_num_seqs
        self.dummy = facts.num_blocks  # one block more: for writes past a block table
        self.cache = np.zeros((facts.num_blocks + 1, facts.block_size), np.uint64)
        self._holders: list[set[int]] = [set() for _ in range(facts.num_blocks)]
        self._random = random.Random(seed)
        self._acceptance, self._oom, self._oom_over = acceptance, oom, oom_over
        self._failed_step = 0

    def step(self, plan: StepPlan, arrays: Arrays) -> StepResult | StepFailed:
        """Runs one plan on its slot's arrays; the outputs are in them when it returns."""
        assert plan.epoch == self.epoch
        assert plan.kind == "generate"
        self._release(arrays["releases"][: plan.num_releases])
        self._admit(arrays["admissions"][: plan.num_admissions], arrays)
        self._extend(arrays["new_blocks"][: plan.num_new_blocks])
        if plan.last_applied < self._failed_step:
            self.num_induced_failures += 1
            return StepFailed(plan.epoch, plan.step, "oom", "planned on top of a failed step")
        if plan.num_seqs and (self._random.random() < self._oom or plan.num_tokens > self._oom_over):
            self._failed_step = plan.step
            return StepFailed(plan.epoch, plan.step, "oom", "as ordered")
        prompt_lines: Lines = []
        rows = arrays["rows"][: plan.num_seqs].tolist()
        assert len({row[columns.GEN_SLOT] for row in rows}) == len(rows), "two rows of one slot"
        assert sum(row[columns.GEN_NUM_TOKENS] for row in rows) <= self.facts.max_num_batched_tokens
        for index, row in enumerate(rows):
            self._run_row(index, row, plan, arrays, prompt_lines)
        for line, (token, logprob) in enumerate(prompt_lines):
            arrays["prompt_logprobs"][line] = logprob
            self._write_top(token, logprob, arrays["prompt_top_ids"][line], arrays["prompt_top_logprobs"][line])
        return StepResult(plan.epoch, plan.step)

    # --- tables -------------------------------------------------------------------------------------------

    def _release(self, table: NDArray[np.generic]) -> None:
        for index, generation in table.tolist():
            slot = self.slots[index]
            assert slot is not None, f"slot {index} released while empty"
            assert slot.generation == generation, f"slot {index} released under generation {generation}"
            for block in slot.blocks:
                self._holders[block].remove(index)
            self.slots[index] = None

    def _admit(self, table: NDArray[np.generic], arrays: Arrays) -> None:
        for line in table.tolist():
            index, num_computed = line[columns.ADMIT_SLOT], line[columns.ADMIT_NUM_COMPUTED]
            assert self.slots[index] is None, f"slot {index} admitted while occupied"
            start = line[columns.ADMIT_PARAMS_OFFSET]
            params = _params.decode(arrays["params"][start : start + line[columns.ADMIT_PARAMS_BYTES]].tobytes())
            generation, num_prompt = line[columns.ADMIT_GENERATION], line[columns.ADMIT_NUM_PROMPT]
            self.slots[index] = Slot(generation, num_prompt, params, num_computed, num_computed)
            offset = line[columns.ADMIT_INPUT_OFFSET]
            self.ids[index, :num_computed] = arrays["input_ids"][offset : offset + num_computed]

    def _extend(self, table: NDArray[np.generic]) -> None:
        for index, position, block in table.tolist():
            slot = self.slots[index]
            assert slot is not None, f"block {block} for empty slot {index}"
            assert position == len(slot.blocks), f"a gap in the block table of slot {index}"
            assert index not in self._holders[block], f"block {block} twice in slot {index}"
            slot.blocks.append(block)
            self._holders[block].add(index)

    # --- rows ---------------------------------------------------------------------------------------------

    def _run_row(self, index: int, row: list[int], plan: StepPlan, arrays: Arrays, prompt_lines: Lines) -> None:
        slot = self.slots[row[columns.GEN_SLOT]]
        assert slot is not None, "a row for an empty slot"
        assert slot.generation == row[columns.GEN_GENERATION], "a row for another generation"
        status, tokens, num_drafts = STATUS_OK, [], 0
        if row[columns.GEN_KIND] == KIND_PREFILL:
            ids = self._prefill_ids(slot, row, arrays)
            if any(not 0 <= token < self.facts.vocab_size for token in ids):
                status = STATUS_BAD_TOKEN
                ids = [token % self.facts.vocab_size for token in ids]
            self.ids[row[columns.GEN_SLOT], slot.num_computed : slot.num_computed + len(ids)] = ids
            tokens = self._prefill(slot, row, ids, prompt_lines)
        else:
            assert slot.num_computed == slot.num_tokens - 1, "decode before the prompt is computed"
            drafts = row[columns.GEN_DRAFT_LENGTH] if row[columns.GEN_KIND] == KIND_VERIFY else 0
            assert drafts <= plan.draft_length
            num_drafts = self._random.randint(0, drafts) if self._random.random() < 0.1 else drafts  # as n-grams do
            tokens = self._verify(slot, row[columns.GEN_SLOT], num_drafts)
            assert slot.num_computed <= row[columns.GEN_MAX_LENGTH], "more tokens than the scheduler's bound"
        if slot.params.seed == POISON_SEED and row[columns.GEN_SAMPLE]:
            status = STATUS_NON_FINITE
        elif slot.params.seed == UNUSABLE_SEED:
            status = STATUS_BAD_PARAMS
        self._answer(index, row[columns.GEN_SLOT], slot, status, tokens, num_drafts, arrays)

    def _prefill_ids(self, slot: Slot, row: list[int], arrays: Arrays) -> list[int]:
        """The chunk's ids, and the first of the next chunk behind them where there is one."""
        assert slot.num_tokens == slot.num_computed, "prefill of a slot that decodes"
        count, offset = row[columns.GEN_NUM_TOKENS], row[columns.GEN_INPUT_OFFSET]
        assert slot.num_computed + count == row[columns.GEN_MAX_LENGTH], "a prefill row's length is exact"
        ids: list[int] = arrays["input_ids"][offset : offset + count + (1 - row[columns.GEN_SAMPLE])].tolist()
        return ids

    def _prefill(self, slot: Slot, row: list[int], ids: list[int], prompt_lines: Lines) -> list[int]:
        total, start = self._attend(slot), slot.num_computed
        for offset, token in enumerate(ids[: row[columns.GEN_NUM_TOKENS]]):
            total = (total + self._write(slot, row[columns.GEN_SLOT], token, start + offset)) & MASK
            if slot.params.prompt_logprobs is not None:
                following = ids[offset + 1] if offset + 1 < len(ids) else 0
                prompt_lines.append((following, prompt_logprob(following, total)))
        slot.num_computed = slot.num_tokens = start + row[columns.GEN_NUM_TOKENS]
        return self._append(slot, row[columns.GEN_SLOT], [self._next(slot, total)]) if row[columns.GEN_SAMPLE] else []

    def _verify(self, slot: Slot, index: int, num_drafts: int) -> list[int]:
        """Computes the last token and its drafts; every one is written, also what comes to be rejected."""
        total, position = self._attend(slot), slot.num_computed
        token, right, accepted = int(self.ids[index, position]), True, []
        for offset in range(num_drafts + 1):
            total = (total + self._write(slot, index, token, position + offset)) & MASK
            target = self._next(slot, total)
            if right:
                accepted.append(target)
            is_right = self._random.random() < self._acceptance
            token = target if is_right else (target + 1) % self.facts.vocab_size
            right = right and is_right
        slot.num_computed += len(accepted)
        return self._append(slot, index, accepted)

    def _append(self, slot: Slot, index: int, tokens: list[int]) -> list[int]:
        end = slot.num_tokens + len(tokens)
        assert end <= self.ids.shape[1], "more tokens than a slot holds"
        self.ids[index, slot.num_tokens : end] = tokens
        slot.num_tokens = end
        return tokens

    def _next(self, slot: Slot, total: int) -> int:
        return next_token(total, slot.params.seed or 0, self.facts.vocab_size)

    def _attend(self, slot: Slot) -> int:
        """The sum of the marks of all computed positions, as they stand in the cache."""
        size = self.facts.block_size
        num_blocks = -(-slot.num_computed // size)
        table = slot.blocks[:num_blocks] + [self.dummy] * (num_blocks - len(slot.blocks))
        return int(self.cache[table].reshape(-1)[: slot.num_computed].sum(dtype=np.uint64)) if table else 0

    def _write(self, slot: Slot, index: int, token: int, position: int) -> int:
        block = position // self.facts.block_size
        value = mark(token, position)
        if block < len(slot.blocks):
            assert self._holders[slot.blocks[block]] == {index}, "a write into a block that others hold"
            self.cache[slot.blocks[block], position % self.facts.block_size] = value
        else:
            self.num_dummy_writes += 1
            self.cache[self.dummy, position % self.facts.block_size] = value
        return value

    def _answer(
        self, index: int, slot_index: int, slot: Slot, status: int, tokens: list[int], num_drafts: int, arrays: Arrays
    ) -> None:
        if status != STATUS_OK:
            tokens = []
        arrays["status"][index] = status
        arrays["num_tokens"][index] = len(tokens)
        arrays["tokens"][index, : len(tokens)] = tokens
        arrays["num_drafts"][index] = num_drafts
        arrays["lengths"][index] = slot.num_tokens
        for place, token in enumerate(tokens):
            logprob = arrays["logprobs"][index, place] = -float(token)
            self._write_top(token, logprob, arrays["top_ids"][index, place], arrays["top_logprobs"][index, place])

    def _write_top(self, token: int, logprob: float, ids: NDArray[np.generic], logprobs: NDArray[np.generic]) -> None:
        """The token itself is the likeliest, those after it in the vocabulary follow."""
        ids[:] = (token + np.arange(len(ids))) % self.facts.vocab_size
        logprobs[:] = logprob - np.arange(len(ids))
