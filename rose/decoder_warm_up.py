"""The first steps of a loaded decoder: a prefill as large as any, a decode step behind it, one with drafts where there
are any, and a grammar.

They show whether memory and kernels are what the settings want, before the first request does. The grammar has the
tokenizer read: that takes 0.25 s for 49 thousand tokens and more than a second for 150 thousand, in which every stream
would wait (on another thread as well: what reads it does not let go of the interpreter).
"""

from typing import Protocol, cast

import msgspec
import numpy as np

from ipc.step import (
    ADMIT_GENERATION,
    ADMIT_NUM_PROMPT,
    ADMIT_PARAMS_BYTES,
    ADMIT_SLOT,
    BLOCK_ID,
    BLOCK_INDEX,
    BLOCK_SLOT,
    GEN_DRAFT_LENGTH,
    GEN_GENERATION,
    GEN_INPUT_OFFSET,
    GEN_KIND,
    GEN_MAX_LENGTH,
    GEN_NUM_TOKENS,
    GEN_SAMPLE,
    GEN_SLOT,
    KIND_DECODE,
    KIND_PREFILL,
    KIND_VERIFY,
    RELEASE_GENERATION,
    RELEASE_SLOT,
    StepPlan,
)
from ipc.step_ring import Arrays, generate_layout, local_slots
from ipc.types import ModelFacts, SamplingParams
from rose.batch import Int32s
from rose.runner import LazyTensor

GRAMMAR = "start: /a/"
CPU_TOKENS = 256  # a CPU has no memory to reserve: larger shapes need no trial, and would take seconds


class Steps(Protocol):
    """A loaded runner, nobody in its slots."""

    facts: ModelFacts

    def step(self, plan: StepPlan, arrays: Arrays) -> LazyTensor: ...

    def drain(self) -> None: ...


def warm_up(runner: Steps) -> None:
    """Runs all of them. Raises OutOfMemory. The sequences stay in their slots: clear them."""
    facts = runner.facts
    arrays = local_slots(generate_layout(facts))[0]
    lengths = prompt_lengths(facts)
    _run(runner, _write_prefill(arrays, lengths, facts), arrays)
    _run(runner, _write_decode(arrays, lengths), arrays)
    if facts.max_draft_tokens and facts.max_num_batched_tokens > 1:
        _run(runner, _write_verify(arrays, lengths[0], facts), arrays)
    _run(runner, _write_grammar(arrays, lengths), arrays)


def _run(runner: Steps, plan: StepPlan, arrays: Arrays) -> None:
    """To its end, since the next plan is written over it."""
    lazy = runner.step(plan, arrays)
    runner.drain()
    lazy.ready()


def prompt_lengths(facts: ModelFacts) -> list[int]:
    """Of the fewest prompts that fill a step; each has room for one token more, in length and in blocks."""
    longest = max(1, facts.max_model_len - 1)
    total = min(facts.max_num_batched_tokens, CPU_TOKENS if facts.device == "cpu" else facts.max_num_batched_tokens)
    lengths: list[int] = []
    num_blocks = facts.num_blocks
    while total and len(lengths) < facts.max_num_seqs:
        length = min(total, longest, num_blocks * facts.block_size - 1)
        if length < 1:
            break
        lengths.append(length)
        total -= length
        num_blocks -= -(-(length + 1) // facts.block_size)
    return lengths


def _write_prefill(arrays: Arrays, lengths: list[int], facts: ModelFacts) -> StepPlan:
    """Every prompt whole, as a plan's tables."""
    count = len(lengths)
    admissions = _write_admissions(arrays, SamplingParams(seed=0), count)
    admissions[:, [ADMIT_SLOT, ADMIT_GENERATION]] = np.arange(count)[:, None]
    admissions[:, ADMIT_NUM_PROMPT] = lengths
    num_blocks = 0
    for slot, length in enumerate(lengths):
        each = -(-(length + 1) // facts.block_size)
        table = arrays["new_blocks"][num_blocks : num_blocks + each]
        table[:, BLOCK_SLOT] = slot
        table[:, BLOCK_INDEX] = np.arange(each)
        table[:, BLOCK_ID] = np.arange(num_blocks, num_blocks + each)
        num_blocks += each
    plan = _write_rows(arrays, lengths, KIND_PREFILL, lengths, step=1)
    return msgspec.structs.replace(plan, num_admissions=count, num_new_blocks=num_blocks)


def _write_decode(arrays: Arrays, lengths: list[int]) -> StepPlan:
    return _write_rows(arrays, [1] * len(lengths), KIND_DECODE, [length + 1 for length in lengths], step=2)


def _write_verify(arrays: Arrays, length: int, facts: ModelFacts) -> StepPlan:
    """Of the first sequence, as many drafts as there can be. Tokens past its blocks, or its end, go to the dummy."""
    num_drafts = min(facts.max_draft_tokens, facts.max_num_batched_tokens - 1)
    plan = _write_rows(arrays, [1 + num_drafts], KIND_VERIFY, [length + 2 + num_drafts], step=3)
    arrays["rows"][0, GEN_DRAFT_LENGTH] = num_drafts
    return msgspec.structs.replace(plan, draft_length=num_drafts)


def _write_grammar(arrays: Arrays, lengths: list[int]) -> StepPlan:
    """No rows: a sequence with a grammar takes the place of the first one."""
    arrays["releases"][0, [RELEASE_SLOT, RELEASE_GENERATION]] = 0
    admissions = _write_admissions(arrays, SamplingParams(seed=0, grammar=GRAMMAR), 1)
    admissions[:, [ADMIT_GENERATION, ADMIT_NUM_PROMPT]] = len(lengths), 1
    return StepPlan(
        epoch=0, step=4, slot=0, kind="generate", canary=True, num_releases=1, num_admissions=1, last_applied=3
    )


def _write_admissions(arrays: Arrays, params: SamplingParams, count: int) -> Int32s:
    """Lines that lack all but their params, which they share."""
    packed = msgspec.msgpack.encode(params)
    arrays["params"][: len(packed)] = np.frombuffer(packed, np.uint8)
    admissions = cast(Int32s, arrays["admissions"][:count])
    admissions[:] = 0
    admissions[:, ADMIT_PARAMS_BYTES] = len(packed)
    return admissions


def _write_rows(arrays: Arrays, num_tokens: list[int], kind: int, max_lengths: list[int], step: int) -> StepPlan:
    rows = arrays["rows"][: len(num_tokens)]
    rows[:] = 0
    rows[:, [GEN_SLOT, GEN_GENERATION]] = np.arange(len(rows))[:, None]
    rows[:, GEN_NUM_TOKENS] = num_tokens
    rows[:, GEN_KIND] = kind
    rows[:, GEN_SAMPLE] = 1
    rows[:, GEN_MAX_LENGTH] = max_lengths
    num_ids = 0
    if kind == KIND_PREFILL:
        rows[:, GEN_INPUT_OFFSET] = np.cumsum([0, *num_tokens[:-1]])
        num_ids = sum(num_tokens)
    return StepPlan(
        epoch=0, step=step, slot=0, kind="generate", num_seqs=len(rows), num_tokens=num_ids, canary=True,
        last_applied=step - 1,
    )  # fmt: skip
