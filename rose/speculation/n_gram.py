"""Drafts looked up in the sequence itself: what followed the last time that its last few tokens stood there.

Prompt lookup (Saxena, "Prompt lookup decoding", 2023). No weights, no state; on the device, over the slots' ids.
"""

import torch

from rose.config import SpeculationConfig
from rose.kv_cache import KVShape
from rose.slots import Slots
from rose.speculation import kernels
from rose.speculation.protocol import Closing, DraftRows, Drafts, ProposerParts, Target

MAX_TOKENS, MIN_TOKENS = 4, 2  # of a suffix that is looked for: the longest that is found counts


class NGram:
    """The longest suffix wins, then its most recent place. What follows is repeated where it runs into the end: text
    that goes round in circles goes on so."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def propose(self, rows: DraftRows) -> Drafts:
        slots, k = self._slots, rows.length
        if kernels.has_kernels(rows.slots):
            return self._look_up(rows)
        length = slots.num_tokens[rows.slots].long()[:, None]
        ids = slots.ids[rows.slots, : rows.max_length]
        places = torch.arange(ids.shape[1], device=ids.device)
        # how many of the last tokens stand before and at each place, but the last place
        matches = places < length - 1
        num_matched = matches.int()
        for back in range(MAX_TOKENS):
            last = ids.gather(1, (length - 1 - back).clamp(0, ids.shape[1] - 1))
            same = torch.zeros_like(matches)
            same[:, back:] = ids[:, : ids.shape[1] - back] == last
            matches = matches & same & (back < length)
            num_matched = matches.int() if back == 0 else num_matched + matches
        best, place = (num_matched.long() * (ids.shape[1] + 1) + places).max(1)
        found = best >= MIN_TOKENS * (ids.shape[1] + 1)
        period = (length[:, 0] - 1 - place).clamp(min=1)
        following = place[:, None] + 1 + torch.arange(k, device=ids.device) % period[:, None]
        tokens = ids.gather(1, following.clamp(max=ids.shape[1] - 1))
        return Drafts(tokens, torch.where(found, rows.limits, 0))

    def _look_up(self, rows: DraftRows) -> Drafts:
        """The same by kernels; the tokens of a row without drafts are zeros."""
        from rose.kernels.n_gram import look_up

        slots, sizes = self._slots, (MAX_TOKENS, MIN_TOKENS)
        return Drafts(
            *look_up(rows.slots, rows.limits, slots.ids, slots.num_tokens, rows.length, rows.max_length, sizes)
        )

    def accepted(self, step: Closing) -> None:
        """The ids are the slots'."""

    def prefill(self, step: Closing) -> None:
        """The ids are the slots'."""


class NGramSource:
    @property
    def kv_shape(self) -> KVShape | None:
        return None

    def open(self, parts: ProposerParts) -> NGram:
        return NGram(parts.residents.slots)


def load_n_gram(config: SpeculationConfig, target: Target) -> NGramSource:
    return NGramSource()
