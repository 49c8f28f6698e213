"""A generate step's tables while they are drawn up in a slot of the ring, and the step as it is kept until its answer.

The layout is ipc.step_ring.generate_layout's, the columns ipc.step's. Decides nothing.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc import step as columns
from ipc.step import KIND_DECODE, KIND_PREFILL, KIND_VERIFY, StepPlan
from ipc.step_ring import MAX_PROMPT_LOGPROBS, Arrays
from ipc.types import ModelFacts
from scheduler.llm.lanes import Flags, Ints, Lanes
from scheduler.llm.sequence import Sequence

NO_LANES: Ints = np.zeros(0, np.int64)


class Prefill(NamedTuple):
    """Tokens [start, end) of a sequence; `sample` where they are its last."""

    sequence: Sequence
    start: int
    end: int
    sample: bool

    @property
    def num_lines(self) -> int:
        """Lines of prompt logprobs that it gives."""
        return 0 if self.sequence.params.prompt_logprobs is None else self.end - self.start


@dataclass(slots=True)
class Step:
    """A step in flight: rows of `lanes`, those of decode (or verify) first, then `prefills`.

    `generations` tell whether a sequence is still where its row was planned for it. `trial`: the sequence under
    suspicion that runs alone in it; `canary`: nobody's.
    """

    step: int
    lanes: Ints
    generations: Ints
    samples: Flags
    max_new: Ints  # tokens each row gives at most
    prefills: list[Prefill]
    draft_length: int = 0
    num_tokens: int = 0  # computed
    alone: bool = False
    trial: Sequence | None = None
    canary: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.lanes)

    @property
    def num_decodes(self) -> int:
        return len(self.lanes) - len(self.prefills)


@dataclass(slots=True)
class Tables:
    """Cursors over a slot's arrays. Whoever adds sees to it that it fits: `max_…` and `num_…` are for that."""

    step: int
    arrays: Arrays
    facts: ModelFacts
    num_input_ids: int = 0
    num_hit_tokens: int = 0
    num_admissions: int = 0
    num_new_blocks: int = 0
    num_params_bytes: int = 0
    num_prompt_lines: int = 0
    draft_length: int = 0
    keep_draft: bool = True
    decodes: Ints = field(default_factory=lambda: NO_LANES)
    drafts: Ints = field(default_factory=lambda: NO_LANES)
    bounds: Ints = field(default_factory=lambda: NO_LANES)
    prefills: list[Prefill] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def max_prompt_lines(self) -> int:
        """How many more lines of prompt logprobs the step can answer."""
        return min(self.facts.max_num_batched_tokens, MAX_PROMPT_LOGPROBS) - self.num_prompt_lines

    def takes_admission(self, sequence: Sequence, num_hit_tokens: int) -> bool:
        """Whether the step has room for its params and the ids of its prefix hits."""
        return (
            self.num_params_bytes + len(sequence.packed_params) <= len(self.arrays["params"])
            and self.num_hit_tokens + num_hit_tokens <= self.facts.max_model_len
        )

    def admit(self, sequence: Sequence, generation: int) -> None:
        """A sequence that has just entered a slot, with its prefix hits and their blocks."""
        params, num_hit_tokens = sequence.packed_params, sequence.num_computed
        line = [0] * 8
        line[columns.ADMIT_SLOT] = sequence.slot
        line[columns.ADMIT_GENERATION] = generation
        line[columns.ADMIT_NUM_PROMPT] = sequence.num_prompt
        line[columns.ADMIT_NUM_COMPUTED] = num_hit_tokens
        line[columns.ADMIT_PARAMS_OFFSET] = self.num_params_bytes
        line[columns.ADMIT_PARAMS_BYTES] = len(params)
        line[columns.ADMIT_INPUT_OFFSET] = self._add_ids(sequence, 0, num_hit_tokens)
        self.arrays["admissions"][self.num_admissions] = line
        start = self.num_params_bytes
        self.arrays["params"][start : start + len(params)] = np.frombuffer(params, np.uint8)
        self.num_admissions += 1
        self.num_params_bytes += len(params)
        self.num_hit_tokens += num_hit_tokens
        self.add_blocks(sequence.slot, 0, sequence.blocks)

    def add_blocks(self, slot: int | Ints, first: int | Ints, blocks: list[int]) -> None:
        """Entries `first` and on of one slot's block table; or with arrays, one entry of each slot's."""
        start, end = self.num_new_blocks, self.num_new_blocks + len(blocks)
        lines = self.arrays["new_blocks"][start:end]
        lines[:, columns.BLOCK_SLOT] = slot
        lines[:, columns.BLOCK_INDEX] = (
            first if isinstance(first, np.ndarray) else np.arange(first, first + len(blocks))
        )
        lines[:, columns.BLOCK_ID] = blocks
        self.num_new_blocks = end

    def add_prefill(self, sequence: Sequence, count: int, lanes: Lanes) -> None:
        start = sequence.num_computed
        end = sequence.num_computed = start + count
        row = Prefill(sequence, start, end, sample=not sequence.prefilling)
        self.prefills.append(row)
        self.num_prompt_lines += row.num_lines
        lane = sequence.lane
        lanes.in_flight[lane] += 1
        lanes.stepped[lane] = self.step
        if row.sample:
            lanes.decoding[lane] = True
            lanes.min_new[lane] += 1
            lanes.max_new[lane] += 1

    def add_decodes(self, chosen: Ints, drafts: Ints, bounds: Ints, lanes: Lanes) -> None:
        """All decode or verify rows at once: their lanes, drafts and most computed tokens afterwards."""
        self.decodes, self.drafts, self.bounds = chosen, drafts, bounds
        lanes.in_flight[chosen] += 1
        lanes.stepped[chosen] = self.step
        lanes.min_new[chosen] += 1
        lanes.max_new[chosen] += drafts + 1

    def finish(
        self, slot: int, last_applied: int, releases: list[tuple[int, int]], lanes: Lanes
    ) -> tuple[StepPlan, Step]:
        """Writes what is left to write. The plan's `epoch` is its sender's to set."""
        num_decodes, num_rows = len(self.decodes), self.num_rows
        if num_decodes:
            self._write_decodes(self.arrays["rows"][:num_decodes], lanes)
        for index, row in enumerate(self.prefills, num_decodes):
            self.arrays["rows"][index] = self._prefill_line(row, lanes)
        if releases:
            self.arrays["releases"][: len(releases)] = releases
        plan = StepPlan(
            epoch=0,
            step=self.step,
            slot=slot,
            kind="generate",
            num_seqs=num_rows,
            num_tokens=self.num_input_ids,
            draft_length=self.draft_length,
            keep_draft=self.keep_draft,
            num_admissions=self.num_admissions,
            num_new_blocks=self.num_new_blocks,
            num_releases=len(releases),
            last_applied=last_applied,
        )
        return plan, self._step(lanes)

    # --- details --------------------------------------------------------------------------------------------

    def _add_ids(self, sequence: Sequence, start: int, end: int) -> int:
        """Ids [start, end) of a sequence; returns where they stand."""
        offset = self.num_input_ids
        self.num_input_ids += end - start
        if end > start:
            ids = np.frombuffer(sequence.ids[start:end], np.int32)
            self.arrays["input_ids"][offset : self.num_input_ids] = ids
        return offset

    def _write_decodes(self, lines: NDArray[np.generic], lanes: Lanes) -> None:
        lines[:, columns.GEN_SLOT] = lanes.slot[self.decodes]
        lines[:, columns.GEN_GENERATION] = lanes.generation[self.decodes]
        lines[:, columns.GEN_NUM_TOKENS] = self.drafts + 1
        lines[:, columns.GEN_KIND] = KIND_VERIFY if self.draft_length else KIND_DECODE
        lines[:, columns.GEN_SAMPLE] = 1
        lines[:, columns.GEN_INPUT_OFFSET] = 0
        lines[:, columns.GEN_DRAFT_LENGTH] = self.drafts
        lines[:, columns.GEN_MAX_LENGTH] = self.bounds

    def _prefill_line(self, row: Prefill, lanes: Lanes) -> list[int]:
        sequence, start, end, sample = row
        line = [0] * 8
        line[columns.GEN_SLOT] = sequence.slot
        line[columns.GEN_GENERATION] = int(lanes.generation[sequence.lane])
        line[columns.GEN_NUM_TOKENS] = end - start
        line[columns.GEN_KIND] = KIND_PREFILL
        line[columns.GEN_SAMPLE] = int(sample)
        line[columns.GEN_INPUT_OFFSET] = self._add_ids(sequence, start, end if sample else end + 1)
        line[columns.GEN_MAX_LENGTH] = end
        return line

    def _step(self, lanes: Lanes) -> Step:
        chosen, prefills = self.decodes, self.prefills
        samples, max_new = np.ones(len(chosen), np.bool_), self.drafts + 1
        if prefills:
            chosen = np.concatenate([chosen, [row.sequence.lane for row in prefills]])
            gives = [row.sample for row in prefills]
            samples = np.concatenate([samples, gives])
            max_new = np.concatenate([max_new, gives])
        num_tokens = sum(row.end - row.start for row in prefills) + len(self.decodes) + int(self.drafts.sum())
        return Step(
            self.step, chosen, lanes.generation[chosen], samples, max_new, prefills, self.draft_length, num_tokens
        )
