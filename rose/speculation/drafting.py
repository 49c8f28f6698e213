"""What proposers with keys and values of their own share: passes of one token a row, and drawing what follows.

Their caches hold entries at the positions that the target has computed, no further: a block for the newest token is
reserved by the plan that computes it. Knows no weights.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rose.attention.interface import Attend
from rose.attention.paged import PagedRows
from rose.layers.packed_linear import pack_linears
from rose.layers.transposed_linear import transpose_linears
from rose.residents import Residents
from rose.sampling.distribution import draw
from rose.sampling.params import SEED_HIGH, SEED_LOW
from rose.sampling.philox import STREAM_DRAFT, uniform_bits
from rose.slots import RowInputs, Slots
from rose.speculation.protocol import DraftRows, Drafts


class Tokens(NamedTuple):
    """What a model (int32 [T] each) and its attention read of T tokens."""

    input_ids: Tensor
    positions: Tensor
    paged: PagedRows


class DraftLM(Protocol):
    """See rose.decoder.LanguageModel."""

    def __call__(self, batch: Tokens | RowInputs, attend: Attend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def one_token_rows(slots: Slots, rows: DraftRows, ids: Tensor, ahead: int) -> Tokens:
    """Token ids int32 [R] of as many rows, `ahead` positions behind their last known token (0: that one)."""
    last = slots.ids.shape[1] - 1
    places = (slots.num_tokens[rows.slots] - 1 + ahead).clamp_(0, last)
    table = slots.block_table[rows.slots]
    block = table.gather(1, (places // slots.block_size).long()[:, None])[:, 0]
    paged = PagedRows(
        cu_seqlens_q=torch.arange(len(ids) + 1, dtype=torch.int32, device=ids.device),
        kv_lengths=places + 1,
        block_table=table,
        slot_mapping=block * slots.block_size + places % slots.block_size,
        max_q_len=1,
        max_kv_len=min(rows.max_length + ahead, last + 1),
    )
    return Tokens(ids, places.clamp(max=slots.max_model_len - 1), paged)


class Draws:
    """Drafts of R rows, one place after another.

    Each row's own parameters hold, and its penalties count the drafts before; a grammar's mask is left to the target.
    `sampled`: rows with a temperature draw theirs (random numbers of stream STREAM_DRAFT); else all take the likeliest.
    """

    def __init__(self, residents: Residents, rows: DraftRows, *, sampled: bool) -> None:
        slots = residents.slots
        self._sampler = residents.sampler
        self._slots = rows.slots
        self._positions = slots.num_tokens[rows.slots]  # of the next one
        self._num_output = self._positions - slots.num_prompt[rows.slots]
        self._sampled = sampled and rows.needs.random
        self._needs = rows.needs._replace(logprobs=False)
        if not self._sampled:
            self._needs = self._needs._replace(random=False, truncation=False)
        self._tokens: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def add(self, logits: Tensor) -> Tensor:
        """The next draft of every row, int32 [R], by logits float32 [R, V], which may be overwritten."""
        place = len(self._tokens)
        before = torch.stack(self._tokens, 1) if place and self._needs.penalties else None
        positions, num_output = self._positions + place, self._num_output + place
        if self._sampled:
            tokens = self._draw(logits, positions, num_output, before)
        else:
            tokens = self._sampler.draw(
                logits, self._slots, positions, num_output, needs=self._needs, before=before
            )  # fmt: skip
        self._tokens.append(tokens)
        return tokens

    def drafts(self, counts: Tensor) -> Drafts:
        """All of them; counts int32 [R] as in Drafts."""
        probabilities = torch.stack(self._probabilities, 1) if self._sampled else None
        return Drafts(torch.stack(self._tokens, 1), counts, probabilities)

    def _draw(self, logits: Tensor, positions: Tensor, num_output: Tensor, before: Tensor | None) -> Tensor:
        sampler = self._sampler
        weights = sampler.weights(logits, self._slots, num_output, needs=self._needs, before=before)
        seeds = sampler.state.table[sampler.state.lines(self._slots)]
        high, low = uniform_bits(seeds[:, SEED_LOW], seeds[:, SEED_HIGH], positions, STREAM_DRAFT)
        total = weights.sum(1)
        self._probabilities.append((weights.double() / total[:, None]).float())
        return draw(weights, high, low, torch.zeros_like(total)).int()


def use_device_layers(model: nn.Module, device: torch.device) -> None:
    """Puts the layers of `model` that its device is fast with in place of the plain ones."""
    if device.type == "cpu":
        transpose_linears(model)
        return
    from rose.layers.kernel_layers import use_kernels  # needs Triton

    use_kernels(model)


def use_device_head(model: nn.Module, device: torch.device) -> None:
    """The same for a whole language model: on CPU its head is better packed."""
    if device.type == "cpu":
        transpose_linears(model.get_submodule("model"))
        pack_linears(model)
        return
    use_device_layers(model, device)
