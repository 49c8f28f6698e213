"""Gateway to scheduler and back: work, its cancellation, and exactly one terminal reply per chunk.

    Submit + [int32 token ids]  ─►            ◄─  Result + [row bytes] | Rejected     (terminal)
    Abort                       ─►            ◄─  TokenChunk                          (generation, many)

A chunk is one message's worth of sequences, all of one request. Token ids and vectors never pass through
msgspec: they ride as raw frames behind the header.
"""

from typing import Literal

from msgspec import Struct

from ipc.types import Count, FinishReason, Id, OutputSpec, Priority, SamplingParams, Timings

RejectCode = Literal[
    "stale",  # meant for another incarnation of this scheduler
    "draining",  # this replica is being stopped: send it elsewhere
    "full",  # the pool is at its bound in requests or tokens
    "not_ready",  # no rank has joined
    "invalid",  # the chunk can never run; `message` says why
    "expired",  # the deadline passed while it waited
    "aborted",  # as asked
    "quarantined",  # it ended two ranks while it ran alone
    "lost",  # its ranks died too often (three attempts)
    "non_finite",  # the model gave NaN or infinity for row `index`
    "out_of_memory",  # it does not fit even alone
]


class Submit(Struct, frozen=True, tag=True, omit_defaults=True):
    """One chunk. Frame 1 holds `sum(lengths)` int32 token ids, sequence after sequence.

    `type_starts[i]` is the position of the first token of type 1 in sequence i (its length when there is
    none); empty means no sequence has any. `fingerprint`s are the scheduler's own affair.
    """

    gateway: Id  # incarnation of the sender
    scheduler: Id  # incarnation the sender believes it talks to
    chunk_id: Id  # unique within the gateway's incarnation
    lengths: list[Count]
    timeout_ms: Count  # what is left until the deadline
    spec: OutputSpec = OutputSpec()
    type_starts: list[Count] = []
    priority: Priority = "interactive"
    attempt: Count = 1  # counts requeues and replicas tried, together
    sampling: SamplingParams | None = None  # generation
    cache_salt: bytes = b""  # generation: prefix-cache hits only within one salt


class Abort(Struct, frozen=True, tag=True):
    gateway: Id
    scheduler: Id
    chunk_id: Id
    reason: Literal["disconnect", "deadline", "stop"] = "disconnect"


class Result(Struct, frozen=True, tag=True):
    """Terminal. Frame 1 holds `num_rows` rows of `row_bytes` bytes each, in the order submitted."""

    gateway: Id
    chunk_id: Id
    num_rows: Count
    row_bytes: Count
    timings: Timings


class Rejected(Struct, frozen=True, tag=True, omit_defaults=True):
    """Terminal. `index` is the sequence within the chunk at fault, where one is."""

    gateway: Id
    chunk_id: Id
    code: RejectCode
    message: str
    index: Count | None = None
    retry_after_ms: Count = 0
    attempt: Count = 1  # as counted so far; the gateway goes on from it


class TokenDelta(Struct, frozen=True, array_like=True):
    """New tokens of one generation. A delta with a `finish_reason` is terminal; the fields below it come then.

    `num_cached_tokens` and `timings` so far come with the first token as well: a gateway that finds a stop string
    gets no terminal delta.

    `num_draft_tokens` are of the delta's own step, and so `num_accepted_tokens`, the first of its tokens.
    `prompt_logprobs` come chunk by chunk as the prompt is computed, in order, from its second token on.
    """

    chunk_id: Id
    tokens: list[Count]
    logprobs: list[float] = []
    top_logprobs: list[list[tuple[Count, float]]] = []
    prompt_logprobs: list[float] = []
    prompt_top_logprobs: list[list[tuple[Count, float]]] = []
    finish_reason: FinishReason | None = None
    num_prompt_tokens: Count = 0
    num_cached_tokens: Count = 0
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    timings: Timings | None = None


class TokenChunk(Struct, frozen=True, tag=True):
    """All of one gateway's new tokens of one step: one message per gateway per step."""

    gateway: Id
    deltas: list[TokenDelta]
