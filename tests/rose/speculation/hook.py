"""Drafts from texts that are known beforehand, each right with a chance of one's choosing.

So a test says how many drafts are accepted, under whatever parameters the texts were made.
"""

from collections.abc import Sequence

import torch

from rose.config import SpeculationConfig
from rose.kv_cache import KVShape
from rose.sampling.philox import uniform_bits
from rose.slots import Slots
from rose.speculation.protocol import Closing, DraftRows, Drafts, LoadProposer, ProposerParts, Target

Texts = Sequence[Sequence[int]]  # of whole sequences, prompts included; may grow
_STREAM = 4  # of random numbers, nobody else's


class Hook:
    """A row whose ids begin one of `texts` is drafted what follows there; a wrong draft is the token after the right
    one in the vocabulary. Reads the slots on the host."""

    def __init__(self, slots: Slots, texts: Texts, acceptance: float, vocab_size: int) -> None:
        self._slots, self._texts, self._acceptance, self._vocab_size = slots, texts, acceptance, vocab_size

    def propose(self, rows: DraftRows) -> Drafts:
        drafts = torch.zeros(len(rows.slots), rows.length, dtype=torch.int32)
        counts = torch.zeros(len(rows.slots), dtype=torch.int32)
        for row, (slot, limit) in enumerate(zip(rows.slots.tolist(), rows.limits.tolist(), strict=True)):
            known = self._slots.ids[slot, : int(self._slots.num_tokens[slot])].tolist()
            following = next((text[len(known) :] for text in self._texts if list(text[: len(known)]) == known), [])
            tokens = torch.tensor(following[:limit], dtype=torch.int32)
            counts[row] = len(tokens)
            drafts[row, : len(tokens)] = self._spoil(tokens, slot, len(known))
        return Drafts(drafts.to(rows.slots.device), counts.to(rows.slots.device))

    def accepted(self, step: Closing) -> None:
        """Nothing is kept."""

    def prefill(self, step: Closing) -> None:
        """Nothing is kept."""

    def _spoil(self, tokens: torch.Tensor, slot: int, begin: int) -> torch.Tensor:
        positions = torch.arange(begin, begin + len(tokens), dtype=torch.int32)
        seed, zero = torch.full_like(positions, slot), torch.zeros_like(positions)
        chance = uniform_bits(seed, zero, positions, _STREAM)[0].double() * 2.0**-31
        return torch.where(chance < self._acceptance, tokens, (tokens + 1) % self._vocab_size)


class _HookSource:
    kv_shape: KVShape | None = None

    def __init__(self, texts: Texts, acceptance: float, vocab_size: int) -> None:
        self._texts, self._acceptance, self._vocab_size = texts, acceptance, vocab_size

    def open(self, parts: ProposerParts) -> Hook:
        return Hook(parts.residents.slots, self._texts, self._acceptance, self._vocab_size)


def load_hook(texts: Texts, acceptance: float) -> LoadProposer:
    """To be put into registry.PROPOSERS."""

    def load(config: SpeculationConfig, target: Target) -> _HookSource:
        return _HookSource(texts, acceptance, target.facts.vocab_size)

    return load
