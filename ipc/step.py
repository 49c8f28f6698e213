"""Scheduler to rank and back: one header per step; the arrays lie in a slot of the step ring.

Row and column numbers below are the layout of the ring's int32 tables (see step_ring.encode_layout and
step_ring.generate_layout), shared by the planner that writes them and the rank that reads them. The rules of a
generate step are in ipc/README.md.
"""

from typing import Literal

from msgspec import Struct

from ipc.types import Count, Id, ModelFacts

# --- columns of `rows` in an encode step; one line per sequence -------------------------------------------
ROW_TYPE_START, ROW_POOLING, ROW_DTYPE, ROW_DIMENSIONS, ROW_NORMALIZE, ROW_OUTPUT_OFFSET = range(6)
ROW_STATUS = 6  # a rank's own: what the row failed with before the launch
POOLING_CODES = {"cls": 0, "mean": 1, "last_token": 2}
DTYPE_CODES = {"float32": 0, "int8": 1, "binary": 2}

# --- the tables of a generate step, in the order in which a rank applies them -----------------------------
# releases: (slot, generation); the slot is empty after it and may be admitted again in the same step
RELEASE_SLOT, RELEASE_GENERATION = range(2)
# admissions: one line per sequence that enters a slot. The first `num_computed` tokens are prefix-cache hits: their
# keys and values lie in blocks already, their ids stand in `input_ids` (for penalties, drafts and grammars). Tokens
# from `num_prompt` on were generated before (preempted, or replayed after a loss) and count as output.
(
    ADMIT_SLOT,
    ADMIT_GENERATION,
    ADMIT_NUM_PROMPT,
    ADMIT_NUM_COMPUTED,
    ADMIT_PARAMS_OFFSET,  # bytes in `params`
    ADMIT_PARAMS_BYTES,
    ADMIT_INPUT_OFFSET,  # of the `num_computed` ids
) = range(7)
# new_blocks: (slot, index in its block table, block)
BLOCK_SLOT, BLOCK_INDEX, BLOCK_ID = range(3)
# rows: one line per sequence taking part. Its tokens: prefill, `num_tokens` ids from `input_offset` and, where no
# token is sampled, one more behind them that the next chunk begins with (draft heads and prompt logprobs need it);
# decode, the slot's last token; verify, the last token and up to `draft_length` drafts that the rank proposes itself.
(
    GEN_SLOT,
    GEN_GENERATION,
    GEN_NUM_TOKENS,  # 1 for decode, 1 + draft_length for verify
    GEN_KIND,
    GEN_SAMPLE,  # 0 for a prefill chunk that is not the last: no token comes of it
    GEN_INPUT_OFFSET,
    GEN_DRAFT_LENGTH,  # at most the plan's
    GEN_MAX_LENGTH,  # computed tokens the slot has after the step at most, for planning on the host; exact for prefill
) = range(8)
KIND_PREFILL, KIND_DECODE, KIND_VERIFY = range(3)

# --- status of a row --------------------------------------------------------------------------------------
STATUS_OK, STATUS_BAD_TOKEN, STATUS_NON_FINITE = range(3)
STATUS_BAD_PARAMS = 3  # of generation: sampling parameters or a grammar that the rank cannot follow; its log says why


class StepPlan(Struct, frozen=True, tag=True, omit_defaults=True):
    """One step. Names deltas only; positions and lengths of decode and verify rows are the device's own state.

    `draft_length` is q - 1 for every row of a verify step; a row's own may be shorter, the rest is padding.
    `last_applied` is the newest step whose outcome the planner knew. When step f of a generation ran out of memory,
    a rank answers StepFailed(oom) to every later step with `last_applied` < f as well (which counts as no further
    f): it applies their tables and computes nothing, since they were planned on top of f.
    """

    epoch: Id
    step: Id
    slot: Count  # of the step ring
    kind: Literal["encode", "generate", "idle"]
    num_seqs: Count = 0
    num_tokens: Count = 0  # ids given in `input_ids`
    canary: bool = False  # a health check's own step; its result is nobody's answer
    # generation
    draft_length: Count = 0
    keep_draft: bool = True  # drafts or not: the draft's state stays valid, so that the sequences may speculate later
    num_admissions: Count = 0
    num_new_blocks: Count = 0
    num_releases: Count = 0
    last_applied: Id = 0


class Shutdown(Struct, frozen=True, tag=True):
    epoch: Id
    reason: str


class Ready(Struct, frozen=True, tag=True):
    """A rank has weights and memory, and has run one real forward pass. `facts` are final."""

    epoch: Id
    incarnation: Id
    rank: Count
    facts: ModelFacts
    load_ms: float = 0.0


class StepResult(Struct, frozen=True, tag=True, omit_defaults=True):
    """The step's outputs are in its slot; from the leading rank only."""

    epoch: Id
    step: Id
    compute_us: Count = 0
    idle_work: bool = False  # the ranks have work for idle steps: graphs to capture


class StepFailed(Struct, frozen=True, tag=True, omit_defaults=True):
    """`oom`: nothing was computed, a smaller step may work. `fatal`: a death notice, the process ends now.

    The tables of a failed generate step (releases, admissions, new blocks) hold all the same; its rows did nothing.
    """

    epoch: Id
    step: Id
    kind: Literal["oom", "fatal"]
    message: str = ""
