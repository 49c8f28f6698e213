"""Drafts by a head over the target's hidden states (rose.speculation.heads), k of them by recycling its own.

The head's entry at position i is made of the target's hidden state of token i and of token i + 1. So it has entries
where the target has, and a token's must wait for the next token: behind a chunk of a prompt that is the first of the
next chunk, behind the last token the one that the step decides. After a step the head runs over the step's tokens with
the ids moved left and the new ones put in; what it says behind the last accepted token begins the next drafts. Entries
made in a loop of drafts, from the head's own hidden states, are thereby replaced by those of the target's.

In a group of ranks the head is divided like the target and drafts on all of them, or is the leader's alone
(`head_ranks`). The hidden states that it reads are whole on every rank, the target's embedding and head are not: so the
leader loads these two once more.
"""

from pathlib import Path
from typing import cast

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from ipc.types import ModelFacts
from rose.attention.paged import PagedRows
from rose.config import SpeculationConfig
from rose.distributed.group import ALONE
from rose.distributed.shard import local_heads
from rose.kv_cache import KVShape
from rose.layers.device_layers import use_device_layers
from rose.models.config import ModelConfig, ModelError
from rose.models.llama import LlamaForCausalLM, LlamaModel
from rose.models.load import load_model
from rose.models.task import GenerateTask
from rose.speculation import kernels
from rose.speculation.draft_vocab import Logits, draft_logits, read_draft_ids
from rose.speculation.drafting import Draws
from rose.speculation.heads import DraftHead, check_head, load_head
from rose.speculation.kept_blocks import KeptBlocks, num_kept
from rose.speculation.no_drafts import load_no_drafts, no_drafts
from rose.speculation.passes import Tokens
from rose.speculation.protocol import Closing, DraftRows, Drafts, ProposerParts, ProposerSource, Target, next_ids


class Mtp:
    """`only_accepted`: after a step the head waits to know the accepted tokens and runs over no others."""

    def __init__(
        self,
        head: DraftHead,
        target: LlamaModel,
        logits: Logits,
        parts: ProposerParts,
        *,
        sampled: bool,
        only_accepted: bool,
    ) -> None:
        self._head, self._target, self._logits, self._parts = head, target, logits, parts
        self._sampled, self._only_accepted = sampled, only_accepted
        slots = parts.residents.slots
        self._kept = KeptBlocks(slots)
        weight = head.post_attention_layernorm.weight
        self._hidden = weight.new_zeros(len(slots.num_tokens), len(weight))  # [S + 1, H]: whose logits come next

    def propose(self, rows: DraftRows) -> Drafts:
        passes = self._kept.open(rows, rows.length)
        if passes is None:
            return no_drafts(rows)
        draws = Draws(self._parts.residents, rows, passes, sampled=self._sampled)
        hidden = _take(self._hidden, rows.slots)
        for place in range(rows.length):
            ids = draws.add(self._logits(hidden))
            if place + 1 < rows.length:
                hidden = self._run(passes.tokens(ids, place), hidden)
        return draws.drafts()

    def accepted(self, step: Closing) -> None:
        if (not step.keep_draft and step.tokens.shape[1] == 1) or not self._kept.serves(step):
            self._kept.close(step, filled=False)
        elif len(step.inputs.input_ids) == step.tokens.numel():  # every row has as many: what follows is `tokens`
            self._close(step, step.tokens.flatten())
        else:
            self.prefill(step)

    def prefill(self, step: Closing) -> None:
        self._close(step, next_ids(step))

    def _close(self, step: Closing, following: Tensor) -> None:
        """following int32 [T]: the id after each of the step's tokens, any behind one that does not count."""
        inputs, hidden = step.inputs, step.hidden
        tokens = Tokens(following, inputs.positions, inputs.paged)
        if self._only_accepted:
            kept = num_kept(step)
            entries = (inputs.spans.offsets < kept[inputs.spans.rows]).nonzero()[:, 0]
            tokens, hidden = _of_entries(tokens, entries, kept), hidden[entries]
            recycled = self._run(tokens, hidden)
            self._hidden[inputs.slots] = recycled[tokens.paged.cu_seqlens_q[1:] - 1]
            self._kept.close(step, filled=True)
        else:
            self._kept.close_with(step, self._run(tokens, hidden), self._hidden)

    def _run(self, tokens: Tokens, hidden: Tensor) -> Tensor:
        """hidden [T, H] of each token, `tokens.input_ids` what follows it -> the head's own, [T, H]."""
        embedding = self._target.embed_tokens(tokens.input_ids)
        attend = self._parts.attention.paged(tokens.paged, self._parts.caches)
        return self._head(embedding, hidden, tokens.positions, attend)


def _take(states: Tensor, slots: Tensor) -> Tensor:
    """states [S + 1, H], slots int32 [R] -> [R, H]."""
    if not kernels.has_kernels(slots):
        return states[slots]
    from rose.kernels.draft_rows import take_rows

    return take_rows(states, slots)


def _of_entries(tokens: Tokens, entries: Tensor, counts: Tensor) -> Tokens:
    """Of R rows the first `counts` (int32 [R]) tokens each, which are `entries` (int64 [n])."""
    paged = tokens.paged
    begins = paged.kv_lengths - paged.cu_seqlens_q.diff()
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    rows = PagedRows(
        cu_seqlens_q=offsets,
        kv_lengths=begins + counts,
        block_table=paged.block_table,
        slot_mapping=paged.slot_mapping[entries],
        max_q_len=paged.max_q_len,
        max_kv_len=paged.max_kv_len,
    )
    return Tokens(tokens.input_ids[entries], tokens.positions[entries], rows)


class _MtpSource:
    """`target`: its embedding and head are what drafts go through, on the ranks of its group. Of its modules only what
    drafts need is held on to."""

    def __init__(
        self, head: DraftHead, kv_shape: KVShape, config: SpeculationConfig, target: Target, *, keeps_head: bool = True
    ) -> None:
        self.kv_shape: KVShape | None = kv_shape
        self._head = head
        self._target = cast(LlamaForCausalLM, target.model).model  # in which kernels may yet take layers' places
        self._logits = draft_logits(
            target.model, config, target.facts.vocab_size, target.group, target.directory, keeps_head=keeps_head
        )
        self._sampled = config.draft_sampling == "sampled"
        on_cpu = target.device.type == "cpu"
        self._only_accepted = config.head_tokens == "accepted" or (config.head_tokens == "auto" and on_cpu)

    def open(self, parts: ProposerParts) -> Mtp:
        return Mtp(
            self._head, self._target, self._logits, parts, sampled=self._sampled, only_accepted=self._only_accepted
        )  # fmt: skip


def load_mtp(config: SpeculationConfig, target: Target) -> ProposerSource:
    """Raises ModelError: see LoadProposer."""
    if config.model is None:
        raise ModelError("speculation.proposer mtp needs speculation.model, the directory of a head for this model")
    keeps_head = True
    if config.head_ranks == "leader" and target.group.size > 1:
        check_mtp(config, target.config, target.facts, target.directory, target.group.size)  # alike on every rank
        if not target.group.leads:
            return load_no_drafts(config, target)
        target = target._replace(model=load_ends(target), group=ALONE)
        keeps_head = target.config.tie_word_embeddings
    head, shape = load_head(Path(config.model), target)
    use_device_layers(head, target.device)
    return _MtpSource(
        head, head_kv_shape(shape, target.group.size, target.dtype), config, target, keeps_head=keeps_head
    )


def head_kv_shape(head: ModelConfig, num_ranks: int, dtype: torch.dtype) -> KVShape:
    """The cache of a head's one layer on each of so many ranks."""
    return KVShape.of(local_heads(head, num_ranks), dtype)._replace(num_layers=1)


def load_ends(target: Target) -> nn.Module:
    """The target without its layers: its embedding and its head, whole on this rank. Raises ModelError."""
    config = replace(target.config, num_hidden_layers=0)
    ends = load_model(
        target.directory, config, GenerateTask(()), target.device, target.dtype, left_out=("model.layers.",)
    )
    use_device_layers(ends, target.device)
    return ends


def check_mtp(
    config: SpeculationConfig, target: ModelConfig, facts: ModelFacts, target_directory: Path, num_ranks: int
) -> tuple[ModelConfig, int]:
    """Whether the head can draft for the target on so many ranks. Its shape, and how many ranks it is divided among.
    Raises ModelError."""
    num_ranks = 1 if config.head_ranks == "leader" else num_ranks
    head = check_head(Path(str(config.model)), target, facts, num_ranks)
    read_draft_ids(config, facts.vocab_size, num_ranks, target_directory)
    return head, num_ranks
