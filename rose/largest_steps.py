"""The largest steps that a language model may be asked for, run once before it has a cache: what memory they take.

Over a cache of a block and its dummy, with slots of their own that go afterwards; what is computed is nobody's.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from ipc.step import GEN_DRAFT_LENGTH, GEN_SLOT
from ipc.types import ModelFacts
from rose.attention.paged import PagedKV, PagedRows
from rose.attention.paged_triton import TritonPagedBackend
from rose.decode_buffers import DecodeBuffers
from rose.decoder import LanguageModel
from rose.distributed.agreement import Agreement
from rose.distributed.group import Group
from rose.graph_policy import padded_seqs
from rose.kv_cache import BLOCK_SIZE, KVShape, allocate
from rose.residents import Residents
from rose.sampling.params import Needs
from rose.slots import RowInputs, Spans
from rose.speculation.lengths import drafts_of_step
from rose.speculation.protocol import Closing, Proposer, ProposerParts, ProposerSource
from rose.static_decoder import StaticDecoder, decode_key

NEEDS = Needs(*[True] * len(Needs._fields))  # with log probabilities and edits both, logits are there twice


class Trial(NamedTuple):
    """A loaded model, and who drafts for it."""

    model: LanguageModel
    source: ProposerSource
    shape: KVShape
    facts: ModelFacts
    device: torch.device
    tokenizer: Path
    group: Group

    def open(self) -> tuple[Residents, list[PagedKV], Proposer]:
        """Slots, a cache and the proposer over them, all of one block."""
        residents = Residents(replace(self.facts, num_blocks=1), self.device, self.tokenizer)
        one = allocate(self.shape._replace(num_layers=1), 1, self.device)
        caches, own = list(one) * self.shape.num_layers, self.source.kv_shape
        drafts = [] if own is None else list(allocate(own._replace(num_layers=1), 1, self.device)) * own.num_layers
        for cache in (*caches[:1], *drafts[:1]):
            cache.k.zero_()
            cache.v.zero_()
        return residents, caches, self.source.open(ProposerParts(residents, drafts, TritonPagedBackend(), caches))


@torch.inference_mode()
def run_largest_prompts(trial: Trial) -> None:
    """A prefill of as many tokens as a step may have, the logits of as many rows, and what the proposer makes of it."""
    model, facts, device = trial.model, trial.facts, trial.device
    _, caches, proposer = trial.open()

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    num_tokens = facts.max_num_batched_tokens
    longest = min(num_tokens, facts.max_model_len)
    num_rows = -(-num_tokens // longest)
    offsets = (torch.arange(num_rows + 1, dtype=torch.int32, device=device) * longest).clamp_(max=num_tokens)
    rows = PagedRows(
        cu_seqlens_q=offsets,
        kv_lengths=offsets.diff(),
        block_table=zeros(num_rows, -(-longest // BLOCK_SIZE)),
        slot_mapping=zeros(num_tokens),
        max_q_len=longest,
        max_kv_len=longest,
    )
    tokens = torch.arange(num_tokens, device=device)
    spans = Spans(offsets, tokens // longest, tokens % longest)
    inputs = RowInputs(zeros(num_tokens), zeros(num_tokens), rows, zeros(num_tokens), zeros(num_rows), spans)
    hidden = model(inputs, TritonPagedBackend().paged(rows, caches))
    logits = model.logits(hidden[: facts.max_num_seqs])
    logits.clone()  # sampling's, where log probabilities need the logits as they were
    tokens, num_new = zeros(num_rows, 1), zeros(num_rows) + 1
    proposer.prefill(Closing(inputs, hidden, tokens, num_new, offsets.diff(), True))


@torch.inference_mode()
def run_largest_verify(trial: Trial) -> None:
    """The step with the most drafts."""
    facts, device = trial.facts, trial.device
    residents, caches, proposer = trial.open()
    residents.sampler.state.reserve()  # of a step with penalties: ranks that draw nothing count, too
    buffers = DecodeBuffers(facts, residents.slots.block_table.shape[1], device)
    agreement = Agreement(trial.group, residents.slots)
    static = StaticDecoder(trial.model, residents, buffers, agreement, proposer)
    num_rows, draft_length = most_drafts(facts)
    buffers.table[:, GEN_SLOT], buffers.table[:, GEN_DRAFT_LENGTH] = facts.max_num_seqs, 0
    key = decode_key(num_rows, "triton", NEEDS, draft_length=draft_length)
    static.forward(key, TritonPagedBackend().paged(static.paged_rows(key), caches))


def most_drafts(facts: ModelFacts) -> tuple[int, int]:
    """(rows, padded ones included; drafts of each) of the step that computes most tokens for its drafts.

    Fewer rows may have more drafts each, and be padded to as many rows."""
    most = facts.max_num_seqs
    sizes = ((padded_seqs(rows, most), drafts_of_step(facts, rows)[0]) for rows in range(1, most + 1))
    return max(sizes, key=lambda size: size[0] * (size[1] + 1) * (size[1] > 0))
