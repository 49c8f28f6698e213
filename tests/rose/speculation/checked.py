"""A proposer whose every greedy draft is compared with what its model says of the whole sequence, nothing cached.

So its keys and values must be right: after chunks, prefix hits, preemption, rejections, in blocks that were others'.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.attention.interface import AttentionShape
from rose.config import SpeculationConfig
from rose.speculation.mtp import Mtp
from rose.speculation.protocol import (
    Closing,
    DraftRows,
    Drafts,
    LoadProposer,
    Proposer,
    ProposerParts,
    ProposerSource,
    Target,
)
from tests.rose.speculation.hook import Hook, Texts

EACH = 3
CLOSE = 1e-3  # logits that may stand in another order


class Batch(NamedTuple):
    input_ids: Tensor
    positions: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """One sequence: q [T, num_heads, head_dim] over k, v [T, num_kv_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def positions_of(ids: Tensor) -> Tensor:
    return torch.arange(len(ids), dtype=torch.int32)


class Checked:
    """Of every `each` rows one is compared. `num_checked`: drafts that were; `num_lapsed`: rows that had none.

    Random heads are hardly ever right, so the target of one gets drafts of `texts` (tests.rose.speculation.hook):
    what it accepts must not matter to what the head says next.
    """

    def __init__(self, proposer: Proposer, target: Target, parts: ProposerParts, texts: Texts) -> None:
        self._proposer, self._target, self._residents = proposer, target, parts.residents
        self._hook = Hook(parts.residents.slots, texts, 0.7, target.facts.vocab_size)
        self.each = EACH
        self._num_rows = self.num_checked = self.num_lapsed = 0

    def propose(self, rows: DraftRows) -> Drafts:
        drafts = self._proposer.propose(rows)
        for row, slot in enumerate(rows.slots.tolist()):
            count, limit = int(drafts.counts[row]), int(rows.limits[row])
            assert count in (0, limit)
            self.num_lapsed += count < limit
            self._num_rows += 1
            if self._num_rows % self.each == 0:
                self._check(slot, drafts.tokens[row, :count])
        if not isinstance(self._proposer, Mtp):
            return drafts
        others = self._hook.propose(rows)
        return Drafts(others.tokens, torch.minimum(drafts.counts, others.counts))

    def accepted(self, step: Closing) -> None:
        self._proposer.accepted(step)

    def prefill(self, step: Closing) -> None:
        self._proposer.prefill(step)

    def _check(self, slot: int, drafts: Tensor) -> None:
        slots = self._residents.slots
        ids, begin = slots.ids[slot, : int(slots.num_tokens[slot])], int(slots.num_prompt[slot])
        say = self._head_logits(ids) if isinstance(self._proposer, Mtp) else self._model_logits(ids)
        for place, draft in enumerate(drafts):
            logits = self._adjusted(slot, say(drafts[:place]), len(ids) + place - begin, drafts[:place])
            assert logits[draft] > logits.max() - CLOSE, f"draft {place} behind {len(ids)} tokens"
            self.num_checked += 1

    def _adjusted(self, slot: int, logits: Tensor, num_output: int, before: Tensor) -> Tensor:
        """By the row's own parameters."""
        sampler = self._residents.sampler
        slots, counts = torch.tensor([slot]), torch.tensor([num_output])
        needs = sampler.needs([slot])
        return sampler.adjusted(logits[None], slots, counts, needs=needs, before=before[None], keep=True)[0]

    def _model_logits(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        model = self._proposer._model  # type: ignore[attr-defined]

        def say(drafts: Tensor) -> Tensor:
            known = torch.cat((ids, drafts))
            return model.logits(model(Batch(known, positions_of(known)), attend)[-1:])[0]

        return say

    def _head_logits(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        head, model = self._proposer._head, self._target.model  # type: ignore[attr-defined]
        states = model(Batch(ids[:-1], positions_of(ids[:-1])), attend)  # grows by the head's own

        def say(drafts: Tensor) -> Tensor:
            nonlocal states
            following = torch.cat((ids[1:], drafts))
            recycled = head(model.model.embed_tokens(following), states, positions_of(following), attend)  # type: ignore[operator,union-attr]
            states = torch.cat((states, recycled[-1:]))
            return model.logits(recycled[-1:])[0]  # type: ignore[operator]

        return say


def check_drafts(load: LoadProposer, opened: list[Checked], texts: Texts) -> LoadProposer:
    """The same proposer, checked; what is opened is put in `opened`."""

    class Source:
        def __init__(self, source: ProposerSource, target: Target) -> None:
            self._source, self._target = source, target
            self.kv_shape = source.kv_shape

        def open(self, parts: ProposerParts) -> Checked:
            opened.append(Checked(self._source.open(parts), self._target, parts, texts))
            return opened[-1]

    def load_checked(config: SpeculationConfig, target: Target) -> Source:
        return Source(load(config, target), target)

    return load_checked
