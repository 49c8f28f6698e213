"""What a request asks for and what comes of it, whatever the dialect it was written in."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gateway.tool_calls import ArgumentsDelta, CallStart
from gateway.tools import Tool, ToolChoice
from ipc.types import OutputSpec, SamplingParams, Timings

Text = str | list[int]  # token ids are taken as given


def place(field: str, index: int) -> str:
    """How an error names one of a field's items; `query` and `instruction` are single texts."""
    return field if field in ("query", "instruction") else f"{field}[{index}]"


class EmbedTask(Struct, frozen=True):
    """Vectors for `inputs`. `encoding` is the dialect's own affair, `spec` what the rank is asked for."""

    model: str
    inputs: list[Text]
    spec: OutputSpec = OutputSpec()
    encoding: Literal["float", "base64"] = "float"
    truncate: bool = False
    prompt_name: str | None = None


class ScoreTask(Struct, frozen=True):
    """A score for every pair of `queries[q]` and `documents[d]`, (q, d) in `pairs`; or for ready-joined token ids.

    `fields` names the client's fields that hold queries, documents and joined ids, for errors.
    """

    model: str
    queries: list[Text]
    documents: list[Text]
    pairs: list[tuple[int, int]]
    joined: list[list[int]] = []
    joined_type_starts: list[int] = []
    truncate: bool = True
    instruction: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    fields: tuple[str, str, str] = ("query", "documents", "pairs")


class ChatPrompt(Struct, frozen=True):
    """A conversation for the model's chat template. Messages and tools are as templates take them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}


class Structure(Struct, frozen=True):
    """What an answer must look like: a `response_format`, or a schema, pattern or list of choices. `param` is the
    client's field that says it."""

    kind: Literal["format", "schema", "regex", "choice"]
    value: Any
    param: str


class ToolUse(Struct, frozen=True):
    """What the model may call, or must."""

    tools: list[Tool]
    choice: ToolChoice
    parallel: bool = True


class GenerateTask(Struct, frozen=True):
    """`n` generations for every one of `prompts`, or for `chat`. Choice i is of prompt i // n.

    `sampling` is what the ranks are asked for; max_tokens and the seed in it are set when the prompt's length is known:
    `max_tokens`, or what is left of the context, but then no more than `usual_max_tokens`. `left_open` are the names of
    its fields that are the model's to say.
    """

    model: str
    prompts: list[Text]
    sampling: SamplingParams
    left_open: frozenset[str] = frozenset()
    chat: ChatPrompt | None = None
    n: int = 1
    max_tokens: int | None = None
    usual_max_tokens: int | None = None
    stop: list[str] = []
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    cache_salt: str | None = None
    structure: Structure | None = None
    tools: ToolUse | None = None

    @property
    def num_choices(self) -> int:
        return self.n * (1 if self.chat is not None else len(self.prompts))


Task = EmbedTask | ScoreTask | GenerateTask


class Encoded(Struct):
    """Token ids of a request's sequences, special tokens included. `type_starts` as in ipc.submit.Submit."""

    sequences: list[list[int]]
    type_starts: list[int] = []

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


class Rows(Struct, frozen=True):
    """Result rows of a request, in order, as the blocks of bytes in which they came."""

    blocks: list[bytes]
    row_bytes: int
    timings: Timings

    def __iter__(self) -> Iterator[memoryview]:
        for block in self.blocks:
            view = memoryview(block)
            for start in range(0, len(view), self.row_bytes):
                yield view[start : start + self.row_bytes]

    def matrix(self, dtype: str) -> NDArray[np.generic]:
        """Rows as an array [rows, values]; no copy for a single block."""
        arrays = [
            np.frombuffer(block, dtype).reshape(-1, self.row_bytes // np.dtype(dtype).itemsize) for block in self.blocks
        ]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class EmbedOutcome(Struct, frozen=True):
    rows: Rows
    num_tokens: int


class ScoreOutcome(Struct, frozen=True):
    """`scores[i]` belongs to `pairs[i]`, or to `joined[i]`."""

    scores: list[float]
    num_tokens: int
    method: Literal["cross_encoder", "cosine_similarity"]


Outcome = EmbedOutcome | ScoreOutcome


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────

EndReason = Literal["stop", "length", "tool_calls"]


class TopToken(Struct, frozen=True, gc=False):
    """Untracked, as is what holds it: a large answer has a million, and a collection would stop everybody for them."""

    text: str
    bytes: bytes
    logprob: float


class TokenInfo(Struct, frozen=True, gc=False):
    """One token and how likely it was; a prompt's first has no likelihood. `offset` is where it begins in the text."""

    text: str
    bytes: bytes
    logprob: float | None
    top: list[TopToken]
    offset: int


class Piece(Struct):
    """What one choice got since its last piece. `first`: it is the choice's first one."""

    choice: int
    text: str = ""
    reasoning: str = ""
    calls: list[CallStart | ArgumentsDelta] = []
    tokens: list[TokenInfo] = []
    finish_reason: EndReason | None = None
    first: bool = False


def num_entries(pieces: list[Piece]) -> int:
    """How much there is to render: pieces, tokens with logprobs, and the likeliest tokens beside them."""
    total = len(pieces)
    for piece in pieces:
        for token in piece.tokens:
            total += 1 + len(token.top)
    return total


class Usage(Struct, frozen=True):
    num_prompt_tokens: int
    num_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int = 0  # speculation: tokens drafted, and those of the output among them
    num_accepted_tokens: int = 0


class Head(Struct, frozen=True):
    """What an answer says of itself, in each of its parts. `id` without the dialect's prefix."""

    id: str
    created: int  # seconds since 1970


class GenerateOutcome(Struct, frozen=True):
    """Each choice as the pieces it came in, in order."""

    head: Head
    choices: list[list[Piece]]
    usage: Usage
