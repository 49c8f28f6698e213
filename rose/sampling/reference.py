"""The operations of sampling in torch, on any device: what kernels are measured against, and what a CPU runs.

Not for captured graphs: it looks at rows on the host to leave out work.
"""

import torch
from torch import Tensor

from rose.sampling.distribution import WEIGHT_BITS, draw, truncate, weights, without_nan
from rose.sampling.params import (
    FLAGS,
    FREQUENCY,
    HAS_PENALTIES,
    INVERSE_REPETITION,
    INVERSE_TEMPERATURE,
    MIN_P,
    MIN_TOKENS,
    NUM_BIASES,
    NUM_STOPS,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TOP_K,
    TOP_P,
    Needs,
)
from rose.sampling.philox import STREAM_DRAFT, STREAM_TOKEN, uniform_bits
from rose.sampling.slots import COUNT_LIMIT, COUNT_MASK, IN_PROMPT, SamplingSlots

# What min_tokens sets a logit to: never drawn beside any other token, yet not impossible, so that a grammar that
# allows nothing but the end still has its way.
MASKED = -1e30
_CACHED_VALUES = 2**16  # logits that are worked on at a time, so that what is made of them stays in the cache


class TorchOps:
    """See rose.sampling.sampler.SamplingOps."""

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
        lines = state.lines(slots)
        if needs.edits:
            _edit(logits, state, lines, num_output)
        if needs.penalties:
            _penalise(logits, state, lines, before)
        if bitmask is not None:
            bits = torch.arange(32, dtype=torch.int32, device=logits.device)
            allowed = (bitmask[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]]
            logits.masked_fill_(allowed == 0, float("-inf"))

    def choose(self, logits: Tensor, state: SamplingSlots, slots: Tensor, positions: Tensor, needs: Needs) -> Tensor:
        logits = without_nan(logits)
        maximum, tokens = logits.max(1)  # the first of several
        if needs.random:
            random = (state.floats[state.lines(slots), INVERSE_TEMPERATURE] > 0).nonzero()[:, 0]
            lines = state.lines(slots[random])
            seeds = state.table[lines]
            high, low = uniform_bits(seeds[:, SEED_LOW], seeds[:, SEED_HIGH], positions[random], STREAM_TOKEN)
            num_rows = max(1, _CACHED_VALUES // logits.shape[1])
            for part in torch.arange(len(random), device=logits.device).split(num_rows):
                rows = random[part]
                weight = processed_weights(logits[rows], maximum[rows], state, lines[part], truncation=needs.truncation)
                tokens[rows] = draw(weight, high[part], low[part], tokens[rows])
        return tokens.int()

    def draw_drafts(
        self,
        logits: Tensor,
        state: SamplingSlots,
        slots: Tensor,
        positions: Tensor,
        needs: Needs,
        probabilities: Tensor,
    ) -> Tensor:
        weight = row_weights(logits, state, slots, needs)
        seeds = state.table[state.lines(slots)]
        high, low = uniform_bits(seeds[:, SEED_LOW], seeds[:, SEED_HIGH], positions, STREAM_DRAFT)
        total = weight.sum(1)
        probabilities.copy_(weight.double() / total[:, None])
        return draw(weight, high, low, torch.zeros_like(total)).int()

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        logits = without_nan(logits)
        keys = ordered_keys(logits).topk(count, dim=1).values
        top_ids = 0x7FFFFFFF - (keys & 0x7FFFFFFF)
        maximum = logits.amax(1, keepdim=True)
        total = weights(logits, maximum[:, 0], torch.ones_like(maximum[:, 0])).sum(1, keepdim=True)
        # of a difference of two logits, not of the logits: what is subtracted last is small
        log_total = (total.float() * 2.0**-WEIGHT_BITS).log()
        chosen = logits.gather(1, tokens.long()[:, None])
        return (
            (chosen - maximum - log_total)[:, 0],
            top_ids.int(),
            logits.gather(1, top_ids) - maximum - log_total,
        )

    def count(self, state: SamplingSlots, slots: Tensor, ids: Tensor, is_output: Tensor | None) -> None:
        counts, lines = state.counts, state.lines(slots)
        assert counts is not None, "no slot has penalties"
        counted = (state.table[lines, FLAGS] & HAS_PENALTIES) != 0
        ids = ids.long()
        is_prompt = torch.zeros_like(counted) if is_output is None else is_output == 0
        prompt, output = counted & is_prompt, counted & ~is_prompt
        counts[lines[prompt], ids[prompt]] |= IN_PROMPT
        lines, ids = lines[output], ids[output]
        room = (counts[lines, ids] & COUNT_MASK) < COUNT_LIMIT
        counts.index_put_((lines, ids), room.to(counts.dtype), accumulate=True)


def row_weights(logits: Tensor, state: SamplingSlots, slots: Tensor, needs: Needs) -> Tensor:
    """What each row's token is drawn from, int64 [R, V] up to 2^40, of adjusted logits; a greedy row, or one without
    any weight, is its largest logit's alone."""
    logits, lines = without_nan(logits), state.lines(slots)
    maximum, best = logits.max(1)
    result = torch.zeros_like(logits, dtype=torch.int64).scatter_(1, best[:, None], 1 << WEIGHT_BITS)
    rows = (state.floats[lines, INVERSE_TEMPERATURE] > 0).nonzero()[:, 0]
    weight = processed_weights(logits[rows], maximum[rows], state, lines[rows], truncation=needs.truncation)
    result[rows] = torch.where(weight.any(1, keepdim=True), weight, result[rows])
    return result


def processed_weights(
    logits: Tensor, maximum: Tensor, state: SamplingSlots, lines: Tensor, *, truncation: bool
) -> Tensor:
    """Weights of the tokens that may be drawn, int64 [R, V], of adjusted logits; rows' temperature is above zero."""
    table, floats = state.table[lines], state.floats[lines]
    weight = weights(logits, maximum, floats[:, INVERSE_TEMPERATURE])
    if truncation:
        weight = truncate(logits, weight, table[:, TOP_K], table[:, TOP_P], floats[:, MIN_P])
    return weight


def _edit(logits: Tensor, state: SamplingSlots, lines: Tensor, num_output: Tensor) -> None:
    """logit_bias, then min_tokens."""
    table = state.table[lines]
    count = int(table[:, NUM_BIASES].amax())
    present = torch.arange(count, device=logits.device) < table[:, NUM_BIASES, None]
    rows, entries = present.nonzero(as_tuple=True)
    logits[rows, state.bias_ids[lines[rows], entries].long()] += state.bias_values[lines[rows], entries]
    count = int(table[:, NUM_STOPS].amax())
    present = torch.arange(count, device=logits.device) < table[:, NUM_STOPS, None]
    rows, entries = (present & (num_output < table[:, MIN_TOKENS])[:, None]).nonzero(as_tuple=True)
    logits[rows, state.stop_ids[lines[rows], entries].long()] = MASKED


def _penalise(logits: Tensor, state: SamplingSlots, lines: Tensor, before: Tensor | None) -> None:
    """Repetition (Keskar et al., "CTRL", 2019) over prompt and output; frequency and presence over the output."""
    rows = (state.table[lines, FLAGS] & HAS_PENALTIES != 0).nonzero()[:, 0]
    if not len(rows):
        return
    assert state.counts is not None
    seen = state.counts[lines[rows], : logits.shape[1]]
    if before is not None:
        ids = before[rows].long()
        seen.scatter_add_(1, ids.clamp(min=0), (ids >= 0).to(seen.dtype))
    floats = state.floats[lines[rows], :, None]
    x = logits[rows]
    repeated = torch.where(x > 0, x * floats[:, INVERSE_REPETITION], x * floats[:, REPETITION])
    x = torch.where(seen != 0, repeated, x)
    count = (seen & COUNT_MASK).float()
    x = x - floats[:, FREQUENCY] * count
    logits[rows] = x - floats[:, PRESENCE] * (count > 0)


def ordered_keys(logits: Tensor) -> Tensor:
    """int64 [R, V] in the order of (logit, lower id first), all different: high word the logit, low word the id."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (order.long() << 32) | (0x7FFFFFFF - ids)
