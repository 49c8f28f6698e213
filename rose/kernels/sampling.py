"""The operations of sampling as Triton kernels: static shapes, nothing waits for the device, captured as they are."""

from torch import Tensor

from rose.kernels.sampling_adjust import count_tokens, edit, penalise_and_mask
from rose.kernels.sampling_choose import choose
from rose.kernels.sampling_kept import draw_drafts
from rose.kernels.sampling_logprobs import token_logprobs
from rose.sampling.params import Needs
from rose.sampling.slots import SamplingSlots


class TritonOps:
    """See rose.sampling.sampler.SamplingOps; logits' rows are contiguous each."""

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
        if needs.edits:
            edit(logits, state, slots, num_output)
        if needs.penalties or bitmask is not None:
            penalise_and_mask(logits, state, slots, bitmask, before, penalties=needs.penalties)

    def choose(self, logits: Tensor, state: SamplingSlots, slots: Tensor, positions: Tensor, needs: Needs) -> Tensor:
        return choose(logits, state, slots, positions, needs)

    def draw_drafts(
        self,
        logits: Tensor,
        state: SamplingSlots,
        slots: Tensor,
        positions: Tensor,
        needs: Needs,
        probabilities: Tensor,
    ) -> Tensor:
        return draw_drafts(logits, state, slots, positions, needs, probabilities)

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        return token_logprobs(logits, tokens, count)

    def count(self, state: SamplingSlots, slots: Tensor, ids: Tensor, is_output: Tensor | None) -> None:
        count_tokens(state, slots, ids, is_output)
