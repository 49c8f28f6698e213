"""What a proposer is to the step that it drafts for. One that is new is one file and one line in registry.py.

A generation step is: `propose` (of decode rows alone, where the plan wants drafts), the target's forward pass over each
row's last token and its drafts, acceptance, then `accepted`, or `prefill` where the step holds rows of prompts. Nothing
here waits for the device; sizes come from arguments that the host knows, so that a step can be captured.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ipc.types import ModelFacts
from rose.attention.paged import PagedBackend, PagedKV
from rose.config import SpeculationConfig
from rose.distributed.group import ALONE, Group
from rose.kv_cache import KVShape
from rose.models.config import ModelConfig
from rose.residents import Residents
from rose.sampling.params import Needs
from rose.slots import RowInputs


class DraftRows(NamedTuple):
    """R decoding sequences, each for up to `length` drafts. All but the tensors are the host's.

    What a row knows stands in the slots' state (rose.slots): `ids[slot, : num_tokens[slot]]`, of which all but the last
    have the target's keys and values. A row of nobody's slot (max_num_seqs) only fills up a batch.
    """

    slots: Tensor  # int32 [R]
    limits: Tensor  # int32 [R]: drafts that this row may have, at most `length`
    length: int  # k, at least 1
    max_length: int  # of known tokens, the longest row's: an upper bound
    needs: Needs  # of the target's sampling in these rows


class Drafts(NamedTuple):
    """What R rows may go on with. The step puts them behind the known ids of their slots; the proposer does not.

    `probabilities`, where a proposer draws its drafts, are what each was drawn from, exactly: after temperature and
    truncation, zero where nothing was kept. None: a draft is the only one that could have been (greedy, looked up).
    """

    tokens: Tensor  # int32 [R, k], below vocab_size, of which the first `counts` count
    counts: Tensor  # int32 [R], 0..limits
    probabilities: Tensor | None = None  # float32 [R, k, V]


class Closing(NamedTuple):
    """A step's R rows when tokens are decided, its T tokens as they were computed, rejected ones included.

    Slots do not know the new tokens yet: row r began behind `inputs.paged.kv_lengths[r]` less its tokens in this step.
    Tensors are the step's own: what is to be carried over is copied.
    """

    inputs: RowInputs  # ids, positions, block table, slot mapping, slots of the forward pass
    hidden: Tensor  # [T, H], of the target, final norm applied
    tokens: Tensor  # int32 [R, k + 1], of which the first `num_new` count
    num_new: Tensor  # int32 [R]: accepted drafts and one more; 0 for a chunk of a prompt that is not its last
    num_given: Tensor  # int32 [R]: ids of a prompt that the row computed, 0 where it decodes
    keep_draft: bool  # False: many sequences run; a proposer with state lets it lapse for these slots


class Proposer(Protocol):
    """Drafts for the sequences in a target's slots.

    It may keep, from step to step, tensors by slot [max_num_seqs + 1, ...] (carried logits, hidden states, whether its
    state is valid) and keys and values in caches of its own under the slots' block table: block b of a sequence is
    block b here as there, so that prefix hits, preemption and memory are the scheduler's affair alone. What it keeps of
    a slot counts from that sequence's last `prefill` that gave a token; nothing tells it that a sequence ended. A slot
    whose state has lapsed gets `counts` of 0 until then.

    A step may run again after a failure (out of memory): none of the methods may count on being called once.
    """

    def propose(self, rows: DraftRows) -> Drafts:
        """Opens a step of decoding rows that the plan wants drafts for."""

    def accepted(self, step: Closing) -> None:
        """Closes a step of decoding rows, with or without drafts."""

    def prefill(self, step: Closing) -> None:
        """Closes a step that holds rows of prompts, beside decoding rows without drafts."""


class Target(NamedTuple):
    """The model that is drafted for, weights loaded."""

    model: nn.Module
    config: ModelConfig  # with the heads of this rank
    directory: Path  # its files
    facts: ModelFacts
    dtype: torch.dtype
    device: torch.device
    group: Group = ALONE


class ProposerParts(NamedTuple):
    """What the decoder gives a proposer when there is memory."""

    residents: Residents  # slots and sampler
    caches: Sequence[PagedKV]  # of its `kv_shape`, as many blocks as the target's; none without one
    attention: PagedBackend  # over these caches
    target_caches: Sequence[PagedKV] = ()


class ProposerSource(Protocol):
    """A proposer with its weights; memory for keys and values is yet to come."""

    @property
    def kv_shape(self) -> KVShape | None:
        """What it keeps for each token of a sequence; None: nothing."""

    def open(self, parts: ProposerParts) -> Proposer: ...


class LoadProposer(Protocol):
    def __call__(self, config: SpeculationConfig, target: Target) -> ProposerSource:
        """Raises ModelError: files that cannot be read, or do not go with the target."""


def next_ids(step: Closing) -> Tensor:
    """int32 [T]: the token after each of the step's tokens, as far as it is known now: new ones included, behind a
    chunk the first of the next. Behind a rejected draft stands what does not count."""
    rows, offsets = step.inputs.spans.rows, step.inputs.spans.offsets
    entry = offsets - (step.num_given - 1).clamp(min=0)[rows]  # which of its row's new tokens follows
    is_new = (entry >= 0) & (entry < step.num_new[rows])
    return torch.where(is_new, step.tokens[rows, entry.clamp(0, step.tokens.shape[1] - 1)], step.inputs.next_ids)
