"""The second stage of a generation step: a step's logits become tokens and, where asked for, log probabilities.

Order: logit_bias, min_tokens' mask, penalties, grammar mask, temperature, then min_p, top_k and top_p, the draw. Masks
and biases commute; log probabilities are of the logits as the model gave them. Knows no model, no step plan, no text.
"""

from typing import Protocol

import torch
from torch import Tensor

from ipc.types import SamplingParams
from rose.sampling.params import Needs
from rose.sampling.reference import TorchOps
from rose.sampling.slots import SamplingSlots


class SamplingOps(Protocol):
    """The operations. `slots` int32 [R] are the rows' slots in `state`."""

    def adjust(
        self,
        logits: Tensor,
        state: SamplingSlots,
        slots: Tensor,
        num_output: Tensor,
        bitmask: Tensor | None,
        needs: Needs,
        before: Tensor | None = None,
    ) -> None:
        """Biases, masks and penalties, in place; `before` as in Sampler.draw."""

    def choose(self, logits: Tensor, state: SamplingSlots, slots: Tensor, positions: Tensor, needs: Needs) -> Tensor:
        """int32 [R]: the token drawn from each row of adjusted logits; the largest one's where it is greedy."""
        ...

    def draw_drafts(
        self,
        logits: Tensor,
        state: SamplingSlots,
        slots: Tensor,
        positions: Tensor,
        needs: Needs,
        probabilities: Tensor,
    ) -> Tensor:
        """int32 [R]: the token drawn from each row of adjusted logits by STREAM_DRAFT, and to `probabilities`, float32
        [R, V], what from."""
        ...

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """float32 [R] of tokens int32 [R]; int32 and float32 [R, count] of the most probable."""
        ...

    def count(self, state: SamplingSlots, slots: Tensor, ids: Tensor, is_output: Tensor | None) -> None:
        """Counts tokens of slots that have penalties; int32 [T]. Without is_output all are output."""


class Sampler:
    """Sampling of one rank. Rows of a step are given by slot; a negative slot, or max_num_seqs, is a padding row.

    A row's token depends on its logits, parameters, counts, position and seed alone. A row whose logits are not
    finite gets some token inside the vocabulary; saying that it failed is the caller's.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        max_logprobs: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        ops: SamplingOps | None = None,
    ) -> None:
        self._max_logprobs = min(max_logprobs, vocab_size)
        self._ops = ops or _default_ops(device)
        self.state = SamplingSlots(
            max_num_seqs=max_num_seqs, vocab_size=vocab_size, eos_token_ids=tuple(eos_token_ids), device=device
        )

    def admit(self, slot: int, params: SamplingParams) -> None:
        """A sequence enters a slot: its parameters, and no tokens seen yet. Raises UnusableParams.

        The copies go to the current stream, outside any capture.
        """
        self.state.admit(slot, params)

    def needs(self, slots: list[int]) -> Needs:
        """Of a step with these rows, from what was admitted."""
        return self.state.needs(slots)

    def observe(self, slots: Tensor, ids: Tensor, is_output: Tensor) -> None:
        """Tokens that were not drawn here: prompts, prefix hits, and output of an earlier life.

        slots, ids, is_output int32 [T]: one line a token; is_output is 0 for a prompt's. Free of cost while no slot
        has penalties.
        """
        if self.state.any_penalties:
            self._ops.count(self.state, slots, ids, is_output)

    def draw(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        num_output: Tensor,
        *,
        needs: Needs,
        bitmask: Tensor | None = None,
        before: Tensor | None = None,
    ) -> Tensor:
        """A token a row, int32 [R]; counts nothing.

        logits float32 [R, V], may be overwritten unless log probabilities are needed; slots int32 [R]; positions int32
        [R] of the token to be drawn, the generator's counter; num_output int32 [R], tokens put out so far; bitmask
        int32 [R, ceil(V / 32)], a bit for each token that may come, lowest first; before int32 [R, k], output that is
        not counted yet and comes before the row's token (drafts), negative where there is none. `needs` must cover
        every row's.
        """
        changed = self.adjusted(
            logits, slots, num_output, needs=needs, bitmask=bitmask, before=before, keep=needs.logprobs
        )
        return self._ops.choose(changed, self.state, slots, positions, needs)

    def count(self, slots: Tensor, tokens: Tensor, needs: Needs) -> None:
        """int32 [T] each: tokens are output of these slots from now on."""
        if needs.penalties:
            self._ops.count(self.state, slots, tokens, None)

    def logprobs(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens int32 [P] under logits float32 [P, V] as the model gave them.

        float32 [P]; int32 [P, M] and float32 [P, M] of the most probable, ties by lower id.
        """
        return self._ops.logprobs(logits, tokens, self._max_logprobs)

    def draw_drafts(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        num_output: Tensor,
        *,
        needs: Needs,
        probabilities: Tensor,
        before: Tensor | None = None,
    ) -> Tensor:
        """As `draw`, from the same distribution by other random numbers (STREAM_DRAFT); that distribution is written to
        `probabilities`, float32 [R, V], whose rows are contiguous. Logits may be overwritten."""
        changed = self.adjusted(logits, slots, num_output, needs=needs, before=before, keep=False)
        return self._ops.draw_drafts(changed, self.state, slots, positions, needs, probabilities)

    def adjusted(
        self,
        logits: Tensor,
        slots: Tensor,
        num_output: Tensor,
        *,
        needs: Needs,
        bitmask: Tensor | None = None,
        before: Tensor | None = None,
        keep: bool,
    ) -> Tensor:
        """Biases, masks and penalties applied: in the same memory, or in a copy where that must be kept."""
        if needs.penalties:
            self.state.reserve()
        if needs.edits or needs.penalties or bitmask is not None:
            logits = logits.clone() if keep else logits
            self._ops.adjust(logits, self.state, slots, num_output, bitmask, needs, before)
        return logits


def _default_ops(device: torch.device) -> SamplingOps:
    if device.type != "cuda":
        return TorchOps()
    from rose.kernels.sampling import TritonOps  # Triton need not be there without a GPU

    return TritonOps()
