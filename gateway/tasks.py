"""What a request asks for and what comes of it, whatever the dialect it was written in."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ipc.types import OutputSpec, Timings

Text = str | list[int]  # token ids are taken as given


def place(field: str, index: int) -> str:
    """How an error names one of a field's items; `query` is a single text."""
    return field if field == "query" else f"{field}[{index}]"


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


Task = EmbedTask | ScoreTask


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
