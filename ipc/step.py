"""Scheduler to rank and back: one header per step; the arrays lie in a slot of the step ring.

Row and column numbers below are the layout of the ring's int32 tables (see step_ring.encode_layout and
step_ring.generate_layout), shared by the planner that writes them and the rank that reads them.
"""

from typing import Literal

from msgspec import Struct

from ipc.types import ModelFacts

# --- columns of `rows` in an encode step; one line per sequence -------------------------------------------
ROW_TYPE_START, ROW_POOLING, ROW_DTYPE, ROW_DIMENSIONS, ROW_NORMALIZE, ROW_OUTPUT_OFFSET = range(6)
POOLING_CODES = {"cls": 0, "mean": 1, "last_token": 2}
DTYPE_CODES = {"float32": 0, "int8": 1, "binary": 2}

# --- columns of the tables of a generate step -------------------------------------------------------------
# rows: one line per sequence taking part; `num_tokens` new tokens; the last of them is sampled if `sample`
GEN_SLOT, GEN_GENERATION, GEN_NUM_TOKENS, GEN_KIND, GEN_SAMPLE, GEN_INPUT_OFFSET = range(6)
KIND_PREFILL, KIND_DECODE, KIND_VERIFY = range(3)
# admissions: one line per sequence that enters a slot in this step
(
    ADMIT_SLOT,
    ADMIT_GENERATION,
    ADMIT_NUM_PROMPT,
    ADMIT_NUM_COMPUTED,
    ADMIT_PARAMS_OFFSET,
    ADMIT_PARAMS_BYTES,
) = range(6)
# new_blocks: (slot, index in the block table, block);  releases: (slot, generation)

# --- status of a row --------------------------------------------------------------------------------------
STATUS_OK, STATUS_BAD_TOKEN, STATUS_NON_FINITE = range(3)


class StepPlan(Struct, frozen=True, tag=True, omit_defaults=True):
    """One step. Names deltas only; positions and lengths of decode rows are the device's own state."""

    epoch: int
    step: int
    slot: int  # of the step ring
    kind: Literal["encode", "generate", "idle"]
    num_seqs: int = 0
    num_tokens: int = 0  # tokens given in `input_ids`
    canary: bool = False  # a health check's own step; its result is nobody's answer
    draft_length: int = 0
    num_admissions: int = 0
    num_new_blocks: int = 0
    num_releases: int = 0


class Shutdown(Struct, frozen=True, tag=True):
    epoch: int
    reason: str


class Ready(Struct, frozen=True, tag=True):
    """A rank has weights and memory, and has run one real forward pass. `facts` are final."""

    epoch: int
    incarnation: int
    rank: int
    facts: ModelFacts
    load_ms: float = 0.0


class StepResult(Struct, frozen=True, tag=True, omit_defaults=True):
    """The step's outputs are in its slot; from the leading rank only."""

    epoch: int
    step: int
    compute_us: int = 0


class StepFailed(Struct, frozen=True, tag=True, omit_defaults=True):
    """`oom`: nothing was computed, a smaller step may work. `fatal`: a death notice, the process ends now."""

    epoch: int
    step: int
    kind: Literal["oom", "fatal"]
    message: str = ""
