"""What the host knows of sequence slots: who is in them, under which parameters. Tokens and lengths are the device's.

Checks what a scheduler says about slots before anything is launched: a row for another generation would read and
write a stranger's cache. Free of torch.
"""

import logging
from typing import NamedTuple, cast

import msgspec
import numpy as np

from ipc.step import (
    ADMIT_GENERATION,
    ADMIT_NUM_COMPUTED,
    ADMIT_NUM_PROMPT,
    ADMIT_PARAMS_BYTES,
    ADMIT_PARAMS_OFFSET,
    ADMIT_SLOT,
    GEN_GENERATION,
    GEN_SLOT,
    RELEASE_GENERATION,
    RELEASE_SLOT,
    STATUS_BAD_PARAMS,
    STATUS_OK,
    StepPlan,
)
from ipc.step_ring import Arrays
from ipc.types import SamplingParams
from rose.batch import Int32s

EMPTY = -1
_log = logging.getLogger("unusable_params")
_decoder = msgspec.msgpack.Decoder(SamplingParams)


class Occupant(NamedTuple):
    """A sequence that entered a slot."""

    slot: int
    params: SamplingParams


class HostSlots:
    """S = max_num_seqs slots."""

    def __init__(self, max_num_seqs: int) -> None:
        self.generation = np.full(max_num_seqs, EMPTY, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)  # where output begins
        self.status = np.full(max_num_seqs, STATUS_OK, np.int32)  # what every row of the sequence fails with
        # tokens that came with prefill rows, as far as penalties have counted them and grammars have met them: further
        # than they are computed where the step then did not fit
        self.num_counted = np.zeros(max_num_seqs, np.int64)
        self.num_met = np.zeros(max_num_seqs, np.int64)
        self.params: list[SamplingParams | None] = [None] * max_num_seqs
        self._step = 0  # the newest, for the log

    def clear(self) -> None:
        self.generation[:] = EMPTY

    def apply(self, plan: StepPlan, arrays: Arrays) -> list[Occupant]:
        """Releases and admissions of a plan; who is new."""
        self._step = plan.step
        for slot, generation in _table(arrays, "releases", plan.num_releases)[:, [RELEASE_SLOT, RELEASE_GENERATION]]:
            held = self.generation[slot]
            assert held == generation, f"step {plan.step}: release of slot {slot} under {generation}, it holds {held}"
            self.generation[slot] = EMPTY
        return [
            self._admit(line, arrays, plan.step) for line in _table(arrays, "admissions", plan.num_admissions).tolist()
        ]

    def fail(self, slot: int, reason: ValueError) -> None:
        """Its parameters cannot be followed here: every further row of it fails, alone. The log alone tells why."""
        self.status[slot] = STATUS_BAD_PARAMS
        _log.warning("slot %d, by step %d: %s", slot, self._step, reason)

    def check_rows(self, table: Int32s, step: int) -> None:
        """table int32 [R, 8] of rows: each for the sequence that is in its slot."""
        held = self.generation[table[:, GEN_SLOT]]
        wrong = np.flatnonzero(held != table[:, GEN_GENERATION])
        assert not len(wrong), f"step {step}: rows {wrong.tolist()} are for generations that their slots do not hold"

    def _admit(self, line: list[int], arrays: Arrays, step: int) -> Occupant:
        slot, begin = line[ADMIT_SLOT], line[ADMIT_PARAMS_OFFSET]
        assert self.generation[slot] == EMPTY, f"step {step}: slot {slot} is admitted while occupied"
        params = _decoder.decode(arrays["params"][begin : begin + line[ADMIT_PARAMS_BYTES]].tobytes())
        self.generation[slot] = line[ADMIT_GENERATION]
        self.num_prompt[slot] = line[ADMIT_NUM_PROMPT]
        self.num_counted[slot] = self.num_met[slot] = line[ADMIT_NUM_COMPUTED]
        self.status[slot] = STATUS_OK
        self.params[slot] = params
        return Occupant(slot, params)


def _table(arrays: Arrays, name: str, num_lines: int) -> Int32s:
    return cast(Int32s, arrays[name][:num_lines])
