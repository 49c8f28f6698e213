"""For tests: drafts that the target would take, each with a chance of one's choosing. Not for serving.

It asks the target itself, whole sequence by whole sequence, so it costs more than it could ever save.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.attention.interface import AttentionShape
from rose.config import SpeculationConfig
from rose.kv_cache import KVShape
from rose.sampling.philox import uniform_bits
from rose.slots import Slots
from rose.speculation.protocol import Closing, DraftRows, Drafts, LoadProposer, ProposerParts, Target

_STREAM = 4  # of random numbers, nobody else's


class _Batch(NamedTuple):
    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]


class Hook:
    """Drafts the most likely next token with the chance `acceptance`, else the one after it in the vocabulary."""

    def __init__(self, target: Target, slots: Slots, acceptance: float) -> None:
        self._target, self._slots, self._acceptance = target, slots, acceptance

    def propose(self, rows: DraftRows) -> Drafts:
        tokens = torch.zeros(len(rows.slots), rows.length, dtype=torch.int32, device=rows.slots.device)
        for row, slot in enumerate(rows.slots.tolist()):
            ids = self._slots.ids[slot, : int(self._slots.num_tokens[slot])]
            for place in range(int(rows.limits[row])):
                ids = torch.cat([ids, self._draft(ids, slot)])
                tokens[row, place] = ids[-1]
        return Drafts(tokens, rows.limits)

    def accepted(self, step: Closing) -> None:
        """Nothing is kept."""

    def prefill(self, step: Closing) -> None:
        """Nothing is kept."""

    def _draft(self, ids: Tensor, slot: int) -> Tensor:
        """int32 [1]."""
        positions = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        hidden = self._target.model(_Batch(ids, positions), _attend)
        best = self._target.model.logits(hidden[-1:]).argmax(1).int()  # type: ignore[operator]
        seed, zero = torch.full_like(best, slot), torch.zeros_like(best)
        chance = uniform_bits(seed, zero, zero + len(ids), _STREAM)[0].double() * 2.0**-31
        return torch.where(chance < self._acceptance, best, (best + 1) % self._target.facts.vocab_size)


def _attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """One sequence: q [T, num_heads, head_dim] over k, v [T, num_kv_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.scale, enable_gqa=True)[0].transpose(
        0, 1
    )


class _HookSource:
    kv_shape: KVShape | None = None

    def __init__(self, target: Target, acceptance: float) -> None:
        self._target, self._acceptance = target, acceptance

    def open(self, parts: ProposerParts) -> Hook:
        return Hook(self._target, parts.residents.slots, self._acceptance)


def load_hook(acceptance: float) -> LoadProposer:
    """To be put into registry.PROPOSERS by a test."""

    def load(config: SpeculationConfig, target: Target) -> _HookSource:
        return _HookSource(target, acceptance)

    return load
