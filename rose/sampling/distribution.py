"""The distribution that a row's token is drawn from, in integers, so that sums have no order.

The weight of a token is exp((x - max) / temperature) in units of 2^-40, rounded down: an int64. Sums of integers are
the same in whatever order, tile or batch they are taken, so a row's token depends on nothing but the row, its seed and
its position. The exponential is made of IEEE multiplications and additions alone, none fused, so that kernels give the
same bits. What weighs less than 2^-40 of the best token is never drawn.

Truncation, with ties: top_k keeps every token whose logit is at least the k-th largest; min_p every token that weighs
at least min_p of the best one; top_p, of what is left, every token of weight >= t, the largest t for which these weigh
at least top_p of it (rounded down to a unit, and one unit at least). So whatever ties with the last one kept is kept.
"""

import torch
from torch import Tensor

from rose.sampling.philox import scale_bits

WEIGHT_BITS = 40
LOG2_E = 1.4426950408889634
# 2^f - 1 on [0, 1), divided by f: relative error 9e-8 in float32, monotone, below 2
EXP2_COEFFICIENTS = (
    0.6931470632553101, 0.2402293086051941, 0.055485282093286514, 0.009675451554358006, 0.0012467846972867846,
    0.00021612914861179888,
)  # fmt: skip
LOWEST_POWER = -60.0  # of two; down here nothing has a weight
MANTISSA_BITS = 23
_FEW = 512  # largest tokens that are looked at first: enough for most rows


def without_nan(logits: Tensor) -> Tensor:
    return torch.where(logits == logits, logits, float("-inf"))


def weights(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """logits float32 [R, V], inverse_temperature float32 [R]. int64 [R, V] in 0..2^40, the largest logit's is 2^40.

    A NaN weighs nothing; a row without a finite largest logit is all zeros.
    """
    maximum = without_nan(logits).amax(1, keepdim=True)
    power = (logits - maximum) * inverse_temperature[:, None] * LOG2_E
    power = torch.where(power > LOWEST_POWER, power, LOWEST_POWER)  # also instead of a NaN
    whole = power.floor()
    fraction = power - whole
    exp2 = fraction * EXP2_COEFFICIENTS[-1]
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        exp2 = (exp2 + coefficient) * fraction
    mantissa = ((exp2 + 1.0) * 2.0**MANTISSA_BITS).long()
    return (mantissa << (WEIGHT_BITS - MANTISSA_BITS)) >> -whole.long()


def truncate(logits: Tensor, weight: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Weights with zeros where a token is not kept. top_k, top_p int32 [R] and min_p float32 [R] as in params.py."""
    vocab_size = logits.shape[1]
    logits = without_nan(logits)
    few = torch.where(top_k < vocab_size, top_k, 1).amax()
    largest = logits.topk(int(few), dim=1).values
    kth = largest.gather(1, (top_k.clamp(max=int(few)).long() - 1)[:, None])
    kept = torch.where((top_k < vocab_size)[:, None], logits >= kth, True)
    kept &= weight >= (min_p * 2.0**WEIGHT_BITS).long()[:, None]
    weight = torch.where(kept, weight, 0)
    rows = (top_p >= 0).nonzero()[:, 0]
    if len(rows):
        least = _top_p_threshold(weight[rows], top_p[rows])
        weight[rows] = torch.where(weight[rows] >= least[:, None], weight[rows], 0)
    return weight


def _top_p_threshold(weight: Tensor, top_p: Tensor) -> Tensor:
    """The largest weight such that those at least as large weigh top_p of all. int64 [R], at least 1."""
    needed = scale_bits(top_p.long(), torch.zeros_like(top_p, dtype=torch.int64), weight.sum(1)).clamp(min=1)
    for count in (min(_FEW, weight.shape[1]), weight.shape[1]):
        largest = weight.topk(count, dim=1).values
        sums = largest.cumsum(1)
        if bool((sums[:, -1] >= needed).all()):
            break
    index = torch.searchsorted(sums, needed[:, None]).clamp(max=largest.shape[1] - 1)
    return largest.gather(1, index)[:, 0].clamp(min=1)


def draw(weight: Tensor, high: Tensor, low: Tensor, fallback: Tensor) -> Tensor:
    """Inverse of the cumulative weights, in the vocabulary's order, at a uniform number of `philox.uniform_bits`.

    int64 [R]; a row without any weight gets its `fallback`.
    """
    sums = weight.cumsum(1)
    total = sums[:, -1]
    target = scale_bits(high, low, total)
    tokens = torch.searchsorted(sums, target[:, None], right=True)[:, 0]
    return torch.where(total > 0, tokens, fallback)
