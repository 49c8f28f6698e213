"""The first steps of a loaded decoder: a prefill as large as any, and a decode step behind it.

They show whether memory and kernels are what the settings want, before the first request does.
"""

from typing import Protocol

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
    GEN_GENERATION,
    GEN_INPUT_OFFSET,
    GEN_KIND,
    GEN_MAX_LENGTH,
    GEN_NUM_TOKENS,
    GEN_SAMPLE,
    GEN_SLOT,
    KIND_DECODE,
    KIND_PREFILL,
    StepPlan,
)
from ipc.step_ring import Arrays, generate_layout, local_slots
from ipc.types import ModelFacts, SamplingParams
from rose.runner import LazyTensor

CPU_TOKENS = 2048  # a CPU has no memory to reserve: larger shapes need no trial


class Steps(Protocol):
    """A loaded runner, nobody in its slots."""

    facts: ModelFacts

    def step(self, plan: StepPlan, arrays: Arrays) -> LazyTensor: ...

    def drain(self) -> None: ...


def warm_up(runner: Steps) -> None:
    """Runs both steps. Raises OutOfMemory. The sequences stay in their slots: clear them."""
    facts = runner.facts
    arrays = local_slots(generate_layout(facts))[0]
    lengths = prompt_lengths(facts)
    for plan in (_write_prefill(arrays, lengths, facts), _write_decode(arrays, lengths)):
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
    params = msgspec.msgpack.encode(SamplingParams(seed=0))
    arrays["params"][: len(params)] = np.frombuffer(params, np.uint8)
    admissions = arrays["admissions"][:count]
    admissions[:, [ADMIT_SLOT, ADMIT_GENERATION]] = np.arange(count)[:, None]
    admissions[:, ADMIT_NUM_PROMPT] = lengths
    admissions[:, ADMIT_PARAMS_BYTES] = len(params)
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
