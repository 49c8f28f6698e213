"""The nouns every process shares: output and sampling options, model facts, timings.

Plain data only. Nothing here knows about sockets, tensors or HTTP. Bounds are checked when a message is decoded,
so that no number from another process is out of range later.
"""

import secrets
from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL_VERSION = 1

MAX_LOGPROBS = 20
MAX_ATTEMPTS = 3  # deaths and replicas lost that one chunk may meet, counted by gateways and schedulers together

Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # incarnations, epochs, steps, chunks
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # lengths, sizes, indices, milliseconds
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]

Task = Literal["embed", "score", "generate"]
Pooling = Literal["cls", "mean", "last_token"]
VectorDType = Literal["float32", "int8", "binary"]
Priority = Literal["interactive", "bulk"]
FinishReason = Literal["stop", "length", "abort"]


def new_incarnation() -> int:
    """A random id for one life of one process; 63 bits, so that every codec can carry it."""
    return secrets.randbits(63)


class OutputSpec(Struct, frozen=True, omit_defaults=True):
    """What a chunk's rows should become. `None` means the model's own default."""

    pooling: Pooling | None = None
    dtype: VectorDType = "float32"
    dimensions: Count | None = None
    normalize: bool | None = None
    spans: tuple[tuple[Count, Count], ...] = ()  # token ranges pooled one by one (late chunking)
    all_tokens: bool = False  # one vector per token instead of one per sequence


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """How one generation picks its tokens. Field names and meanings are OpenAI's and vLLM's."""

    max_tokens: Count = 16
    min_tokens: Count = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    logit_bias: dict[Count, Annotated[float, Meta(ge=-100.0, le=100.0)]] = {}
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    stop_token_ids: tuple[Count, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None  # a compiled-checked llguidance grammar


class ModelFacts(Struct, frozen=True):
    """What the other processes need to know of a model; ranks send it, nobody imports it.

    `dimension` is the width of one output row in values: the embedding size, or the number of labels of a
    scoring model. `max_num_seqs` and `max_num_batched_tokens` bound one step and size the step ring.
    """

    name: str
    architecture: str
    task: Task
    vocab_size: Count
    max_model_len: Count
    dimension: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    dtype: str = "float32"
    pooling: Pooling = "mean"
    normalize: bool = True
    device: str = "cpu"
    tensor_parallel_size: Count = 1
    num_steps_in_flight: Count = 2
    # cost of a sequence of n tokens in a step's budget: n + n² / quadratic_tokens
    quadratic_tokens: Count = 16384
    # generation only
    num_blocks: Count = 0
    block_size: Annotated[int, Meta(ge=1, le=4096)] = 16
    max_draft_tokens: Count = 0
    # drafts by batch size, rising: (most sequences of a step, drafts); a larger step has none, and keeps no draft state
    # of its sequences. Empty: max_draft_tokens, whatever the batch
    draft_lengths: tuple[tuple[Count, Count], ...] = ()
    max_logprobs: Logprobs = MAX_LOGPROBS
    eos_token_ids: tuple[Count, ...] = ()


class Timings(Struct, frozen=True):
    """Where a chunk's time went, milliseconds."""

    queue_ms: float
    compute_ms: float
    num_steps: Count = 1
    num_retries: Count = 0
