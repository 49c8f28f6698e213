"""The health check of a language model: a generation of one token that is nobody's answer."""

import numpy as np

from ipc import step as columns
from ipc.codec import encode
from ipc.step import KIND_PREFILL
from ipc.step_ring import Arrays
from ipc.types import SamplingParams

_PARAMS = encode(SamplingParams(max_tokens=1, temperature=0.0, seed=0))


def write_canary(arrays: Arrays, slot: int, generation: int, block: int) -> None:
    """One admission, one block and one prefill row of the one token that every vocabulary has."""
    admission = [0] * 8
    admission[columns.ADMIT_SLOT] = slot
    admission[columns.ADMIT_GENERATION] = generation
    admission[columns.ADMIT_NUM_PROMPT] = 1
    admission[columns.ADMIT_PARAMS_BYTES] = len(_PARAMS)
    row = [0] * 8
    row[columns.GEN_SLOT] = slot
    row[columns.GEN_GENERATION] = generation
    row[columns.GEN_NUM_TOKENS] = 1
    row[columns.GEN_KIND] = KIND_PREFILL
    row[columns.GEN_SAMPLE] = 1
    row[columns.GEN_MAX_LENGTH] = 1
    arrays["params"][: len(_PARAMS)] = np.frombuffer(_PARAMS, np.uint8)
    arrays["admissions"][0] = admission
    arrays["new_blocks"][0] = (slot, 0, block)
    arrays["rows"][0] = row
    arrays["input_ids"][0] = 0
