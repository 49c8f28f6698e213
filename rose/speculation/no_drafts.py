"""Generation without speculation, as a proposer among others."""

import torch

from rose.config import SpeculationConfig
from rose.kv_cache import KVShape
from rose.speculation.protocol import Closing, DraftRows, Drafts, ProposerParts, Target


def no_drafts(rows: DraftRows) -> Drafts:
    return Drafts(rows.slots.new_zeros(len(rows.slots), rows.length), torch.zeros_like(rows.slots))


class NoDrafts:
    def propose(self, rows: DraftRows) -> Drafts:
        return no_drafts(rows)

    def accepted(self, step: Closing) -> None:
        """Nothing is carried over."""

    def prefill(self, step: Closing) -> None:
        """Nothing is filled."""


class NoDraftsSource:
    @property
    def kv_shape(self) -> KVShape | None:
        return None

    def open(self, parts: ProposerParts) -> NoDrafts:
        return NoDrafts()


def load_no_drafts(config: SpeculationConfig, target: Target) -> NoDraftsSource:
    return NoDraftsSource()
