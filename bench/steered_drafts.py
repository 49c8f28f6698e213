"""Drafts that are right with a chance of one's choosing, at a proposer's own cost.

A model that always says one token (`random:shape?says=ID`) is drafted for by a real proposer; what that drafted is then
replaced: by the token, or by another one, as a table by slot and position says. Two small launches, which a graph may
hold; the table changes under it. Knows no processes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rose.config import SpeculationConfig
from rose.speculation import registry
from rose.speculation.protocol import DraftRows, Drafts, LoadProposer, ProposerParts, Target

SEED = 20261130


class Steering:
    """The table of one rank's model; there is one once the model is loaded."""

    def __init__(self, says: int, num_drafts: int) -> None:
        self._says, self._num_drafts = says, num_drafts
        self._tokens: Tensor | None = None  # int32 [slots, positions, drafts]
        self._chances: Tensor | None = None  # float32 of the same shape: each draft's luck

    def open(self, target: Target) -> None:
        """Room for the slots and positions of a model; every draft is right to begin with."""
        facts = target.facts
        generator = torch.Generator().manual_seed(SEED)
        size = facts.max_num_seqs + 1, facts.max_model_len + self._num_drafts + 1
        luck = torch.rand(size, generator=generator).unfold(1, self._num_drafts, 1)  # a position's, whoever drafts it
        self._chances = luck.contiguous().to(target.device)
        self._tokens = torch.empty(luck.shape, dtype=torch.int32, device=target.device)
        self.accept(1.0)

    @torch.inference_mode()  # as what it changes may have been made in it
    def accept(self, acceptance: float) -> None:
        """From the next step on. Nothing may be in flight."""
        assert self._tokens is not None
        assert self._chances is not None
        wrong = self._says - 1 if self._says else 1
        self._tokens.copy_(torch.where(self._chances < acceptance, self._says, wrong))
        if self._tokens.is_cuda:
            torch.cuda.synchronize(self._tokens.device)

    def drafts(self, slots: Tensor, num_tokens: Tensor, length: int) -> Tensor:
        """int32 [R, length] of slots int32 [R], behind so many known tokens (int32 [R])."""
        assert self._tokens is not None
        places = num_tokens.clamp(max=self._tokens.shape[1] - 1)  # padding is at any
        return self._tokens[slots, places][:, :length].contiguous()


class Steered:
    """A proposer whose drafts are replaced. All else is the proposer's."""

    def __init__(self, proposer: Any, parts: ProposerParts, steering: Steering) -> None:
        self._proposer, self._slots, self._steering = proposer, parts.residents.slots, steering

    def propose(self, rows: DraftRows) -> Drafts:
        found: Drafts = self._proposer.propose(rows)
        known = self._slots.num_tokens[rows.slots]
        return Drafts(self._steering.drafts(rows.slots, known, rows.length), found.counts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)


class _SteeredSource:
    def __init__(self, source: Any, steering: Steering) -> None:
        self._source, self._steering = source, steering

    def open(self, parts: ProposerParts) -> Steered:
        return Steered(self._source.open(parts), parts, self._steering)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def steer(steering: Steering) -> None:
    """Every proposer that this process loads from now on is steered."""

    def steered(load: LoadProposer) -> Callable[[SpeculationConfig, Target], Any]:
        def load_steered(config: SpeculationConfig, target: Target) -> Any:
            steering.open(target)
            return _SteeredSource(load(config, target), steering)

        return load_steered

    plain = {name: load for name, load in registry.PROPOSERS.items() if name != "none"}
    registry.PROPOSERS = dict(registry.PROPOSERS) | {name: steered(load) for name, load in plain.items()}
