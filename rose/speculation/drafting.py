"""What proposers with models share: drawing drafts by what a model says.

Knows no weights and no cache.
"""

from typing import Protocol

import torch
from torch import Tensor

from rose.attention.interface import Attend
from rose.residents import Residents
from rose.slots import RowInputs
from rose.speculation.passes import Passes, RowPlaces, Tokens
from rose.speculation.protocol import DraftRows, Drafts


class DraftLM(Protocol):
    """See rose.decoder.LanguageModel."""

    def __call__(self, batch: Tokens | RowInputs, attend: Attend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Draws:
    """Drafts of R rows, one place after another.

    Each row's own parameters hold, and its penalties count the drafts before; a grammar's mask is left to the target.
    `sampled`: rows with a temperature draw theirs (random numbers of stream STREAM_DRAFT); else all take the likeliest.
    """

    def __init__(self, residents: Residents, rows: DraftRows, passes: Passes, *, sampled: bool) -> None:
        self._sampler = residents.sampler
        self._slots = rows.slots
        self._found: RowPlaces = passes.found
        self._sampled = sampled and rows.needs.random
        self._needs = rows.needs._replace(logprobs=False)
        if not self._sampled:
            self._needs = self._needs._replace(random=False, truncation=False)
        self._tokens: list[Tensor] = []
        self._length = rows.length
        self._probabilities: Tensor | None = None

    def add(self, logits: Tensor) -> Tensor:
        """The next draft of every row, int32 [R], by logits float32 [R, V], which may be overwritten."""
        place = len(self._tokens)
        before = torch.stack(self._tokens, 1) if place and self._needs.penalties else None
        positions, num_output = self._found.next_positions[place], self._found.num_output[place]
        if self._sampled:
            if self._probabilities is None:
                self._probabilities = logits.new_empty(len(logits), self._length, logits.shape[1])
            tokens = self._sampler.draw_drafts(
                logits, self._slots, positions, num_output,
                needs=self._needs, probabilities=self._probabilities[:, place], before=before,
            )  # fmt: skip
        else:
            tokens = self._sampler.draw(
                logits, self._slots, positions, num_output, needs=self._needs, before=before
            )  # fmt: skip
        self._tokens.append(tokens)
        return tokens

    def drafts(self) -> Drafts:
        """All of them."""
        tokens = self._tokens
        side_by_side = tokens[0][:, None] if len(tokens) == 1 else torch.stack(tokens, 1)
        return Drafts(side_by_side, self._found.limits, self._probabilities)
