"""Which drafts the target takes, and the token that follows them. The output's distribution is the target's own.

A draft that was the only possible one is taken where the target's own draw is that token: with the chance that the
target gives it, and what follows a rejection is drawn from the rest. Draws depend on (seed, position) alone, so the
tokens are those of a generation without drafts, draw for draw, greedy or not. Drafts drawn from a distribution are
taken by the rule of Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023.

In torch, the reference of the kernels that a GPU runs. Knows no model and no plan.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rose.sampling.distribution import WEIGHT_BITS, draw
from rose.sampling.params import SEED_HIGH, SEED_LOW, Needs
from rose.sampling.philox import STREAM_ACCEPT, STREAM_RESAMPLE, STREAM_TOKEN, uniform_bits
from rose.sampling.reference import row_weights
from rose.sampling.sampler import Sampler
from rose.slots import Spans
from rose.speculation import kernels

NO_SLOT = -1  # of places that sampling leaves alone


class Places(NamedTuple):
    """The N places of a step that tokens may be drawn at: of each row the one behind its known tokens, and one behind
    each draft that it was planned for."""

    slots: Tensor  # int32 [N]; NO_SLOT where nobody asks
    positions: Tensor  # int32 [N], absolute, of the token to be drawn
    num_output: Tensor  # int32 [N]: tokens put out before it, drafts included
    spans: Spans  # of R rows; its offsets are the drafts before each place


class Accepted(NamedTuple):
    """Of R rows with up to k drafts."""

    tokens: Tensor  # int32 [R, k + 1]: accepted drafts, then one more; zeros behind
    num_new: Tensor  # int32 [R], at least 1


def verify(
    sampler: Sampler,
    logits: Tensor,
    places: Places,
    drafts: Tensor,
    counts: Tensor,
    probabilities: Tensor | None,
    *,
    needs: Needs,
    bitmask: Tensor | None = None,
) -> Accepted:
    """Decides a step; counts nothing (see `count_output`).

    logits float32 [N, V], overwritten unless log probabilities are needed; drafts int32 [R, k] of which the first
    `counts` (int32 [R]) count, and what they were drawn from (float32 [R, k, V]; None: nothing else was possible);
    bitmask int32 [N, ceil(V / 32)].
    """
    before = drafts_before(places.spans, drafts) if needs.penalties and drafts.shape[1] else None
    masks: dict[str, Any] = {"needs": needs, "bitmask": bitmask, "before": before}
    if probabilities is None:
        draws = sampler.draw(logits, places.slots, places.positions, places.num_output, **masks)
        return accept_draws(draws, places.spans, drafts, counts)
    adjusted = sampler.adjusted(logits, places.slots, places.num_output, **masks, keep=needs.logprobs)
    if kernels.has_kernels(logits):
        return _accept_drawn(sampler, adjusted, places, drafts, counts, probabilities, needs)
    weights = row_weights(adjusted, sampler.state, places.slots, needs)
    seeds = sampler.state.table[sampler.state.lines(places.slots), SEED_LOW : SEED_HIGH + 1]
    return accept_drawn(weights, seeds, places, drafts, counts, probabilities)


def count_output(sampler: Sampler, places: Places, tokens: Tensor, num_new: Tensor, needs: Needs) -> None:
    """The step's new tokens are output from now on: tokens int32 [R, k + 1], of which the first `num_new` count."""
    if needs.penalties:
        kept = places.spans.offsets < num_new[places.spans.rows]
        sampler.count(torch.where(kept, places.slots, NO_SLOT), at_places(tokens, places.spans), needs)


def accept_draws(draws: Tensor, spans: Spans, drafts: Tensor, counts: Tensor) -> Accepted:
    """draws int32 [N]: the target's own at every place, each as if all drafts before it were taken."""
    if kernels.has_kernels(draws):
        from rose.kernels import accept  # Triton need not be there without a GPU

        return Accepted(*accept.accept_draws(draws, spans.cu_seqlens, drafts, counts))
    num_rows, k = drafts.shape
    tokens = draws.new_zeros(num_rows, k + 1)
    tokens[spans.rows, spans.offsets] = draws
    return _cut(tokens, tokens[:, :k] == drafts, counts)


def accept_drawn(
    weights: Tensor, seeds: Tensor, places: Places, drafts: Tensor, counts: Tensor, probabilities: Tensor
) -> Accepted:
    """Draft d of probability q is taken with the chance p / q; the first that is not is replaced by one drawn from what
    p has more than q. weights int64 [N, V] are p's, seeds int32 [N, 2] the rows' of each place."""
    (rows, offsets), k = places.spans[1:], drafts.shape[1]
    total = weights.sum(1)
    own = offsets < k  # places that a draft stands at
    draft = drafts[rows, offsets.clamp(max=k - 1)].long()
    p = weights.gather(1, draft[:, None])[:, 0].double() / total
    q = probabilities[rows, offsets.clamp(max=k - 1), draft].double()
    high, low = uniform_bits(seeds[:, 0], seeds[:, 1], places.positions, STREAM_ACCEPT)
    taken = own & ((high.double() * 2.0**31 + low.double()) * 2.0**-62 * q < p)
    padded = torch.zeros_like(drafts, dtype=torch.bool)
    padded[rows[own], offsets[own]] = taken[own]
    tokens = torch.cat([drafts, torch.zeros_like(drafts[:, :1])], dim=1)
    accepted = _cut(tokens, padded, counts)
    last = accepted.num_new - 1
    place = places.spans.cu_seqlens[:-1] + last
    rejected = (last < counts)[:, None]
    difference = (
        weights[place].double() / total[place, None]
        - probabilities.gather(1, last.long().clamp(max=k - 1)[:, None, None].expand(-1, 1, probabilities.shape[2]))[
            :, 0
        ].double()
    )
    residual = (difference.clamp(min=0) * 2.0**WEIGHT_BITS).long()
    rejected = rejected & residual.any(1, keepdim=True)  # p and q are one: no draft is rejected but by rounding
    seed, position = seeds[place], places.positions[place]
    plain = uniform_bits(seed[:, 0], seed[:, 1], position, STREAM_TOKEN)
    again = uniform_bits(seed[:, 0], seed[:, 1], position, STREAM_RESAMPLE)
    high, low = (torch.where(rejected[:, 0], a, b) for a, b in zip(again, plain, strict=True))
    final = draw(torch.where(rejected, residual, weights[place]), high, low, torch.zeros_like(total[place]))
    accepted.tokens.scatter_(1, last.long()[:, None], final.int()[:, None])
    return accepted


def _accept_drawn(
    sampler: Sampler,
    logits: Tensor,
    places: Places,
    drafts: Tensor,
    counts: Tensor,
    probabilities: Tensor,
    needs: Needs,
) -> Accepted:
    """The same by kernels, which keep weights nowhere; logits float32 [N, V] are adjusted."""
    from rose.kernels.accept import DrawnAt, accept_drawn
    from rose.kernels.sampling_kept import kept

    at = DrawnAt(places.slots, places.positions, places.spans.cu_seqlens)
    each = kept(logits, sampler.state, places.slots, needs)
    return Accepted(*accept_drawn(each, sampler.state, at, drafts, counts, probabilities))


def drafts_before(spans: Spans, drafts: Tensor) -> Tensor:
    """int32 [N, k]: the drafts of its row before each place, -1 behind them."""
    is_before = torch.arange(drafts.shape[1], device=drafts.device) < spans.offsets[:, None]
    return torch.where(is_before, drafts[spans.rows], -1)


def at_places(values: Tensor, spans: Spans) -> Tensor:
    """[R, k + 1] -> [N]."""
    return values[spans.rows, spans.offsets]


def by_rows(values: Tensor, spans: Spans, width: int) -> Tensor:
    """[N, ...] -> [R, width, ...], zeros behind each row's own."""
    padded = values.new_zeros(len(spans.cu_seqlens) - 1, width, *values.shape[1:])
    padded[spans.rows, spans.offsets] = values
    return padded


def _cut(tokens: Tensor, taken: Tensor, counts: Tensor) -> Accepted:
    """Accepted up to the first draft that was not taken; tokens [R, k + 1] (changed), taken bool [R, k]."""
    entry = torch.arange(tokens.shape[1], device=tokens.device)
    taken = taken & (entry[:-1] < counts[:, None])
    num_accepted = taken.int().cumprod(1).sum(1)
    tokens.masked_fill_(entry > num_accepted[:, None], 0)
    return Accepted(tokens, (num_accepted + 1).int())
