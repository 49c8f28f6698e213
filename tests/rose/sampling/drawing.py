"""A sampler's parts in a row, as tests ask for them: draw, log probabilities, count; and what it would draw from."""

from typing import NamedTuple

from torch import Tensor

from rose.sampling.params import Needs
from rose.sampling.reference import row_weights
from rose.sampling.sampler import Sampler


class Sampled(NamedTuple):
    """The last three only where the step's needs say so. M is the sampler's max_logprobs."""

    tokens: Tensor  # int32 [R]
    logprobs: Tensor | None = None  # float32 [R], of the tokens
    top_ids: Tensor | None = None  # int32 [R, M], most probable first, ties by lower id
    top_logprobs: Tensor | None = None  # float32 [R, M]


def sample(
    sampler: Sampler,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    num_output: Tensor,
    *,
    needs: Needs,
    bitmask: Tensor | None = None,
) -> Sampled:
    """Draws a token a row, its arguments as Sampler.draw's, and counts it as output of its slot; log probabilities if
    needed."""
    tokens = sampler.draw(logits, slots, positions, num_output, needs=needs, bitmask=bitmask)
    found = sampler.logprobs(logits, tokens) if needs.logprobs else ()
    sampler.count(slots, tokens, needs)
    return Sampled(tokens, *found)


def weights(sampler: Sampler, logits: Tensor, slots: Tensor, num_output: Tensor, *, needs: Needs) -> Tensor:
    """The distribution that would be drawn from in integers, int64 [R, V] up to 2^40; logits stay as they are."""
    changed = sampler.adjusted(logits, slots, num_output, needs=needs, keep=True)
    return row_weights(changed, sampler.state, slots, needs)


def probabilities(sampler: Sampler, logits: Tensor, slots: Tensor, num_output: Tensor, *, needs: Needs) -> Tensor:
    """The same, float32 [R, V]; a greedy row is 1 at its largest logit."""
    weight = weights(sampler, logits, slots, num_output, needs=needs)
    return (weight.double() / weight.sum(1, keepdim=True)).float()
