"""The nouns every process shares: output and sampling options, model facts, timings.

Plain data only. Nothing here knows about sockets, tensors or HTTP.
"""

import secrets
from typing import Literal

from msgspec import Struct

PROTOCOL_VERSION = 1

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
    dimensions: int | None = None
    normalize: bool | None = None
    spans: tuple[tuple[int, int], ...] = ()  # token ranges pooled one by one (late chunking)
    all_tokens: bool = False  # one vector per token instead of one per sequence


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """How one generation picks its tokens. Field names and meanings are OpenAI's and vLLM's."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
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
    vocab_size: int
    max_model_len: int
    dimension: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str = "float32"
    pooling: Pooling = "mean"
    normalize: bool = True
    device: str = "cpu"
    tensor_parallel_size: int = 1
    num_steps_in_flight: int = 2
    # cost of a sequence of n tokens in a step's budget: n + n² / quadratic_tokens
    quadratic_tokens: int = 16384
    # generation only
    num_blocks: int = 0
    block_size: int = 16
    max_draft_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()


class Timings(Struct, frozen=True):
    """Where a chunk's time went, milliseconds."""

    queue_ms: float
    compute_ms: float
    num_steps: int = 1
    num_retries: int = 0
