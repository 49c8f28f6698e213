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
_EXPONENT_BIAS = 127  # of float32
_FIRST_LOOKS = (512, 4096)  # largest weights that are tried before all are sorted: enough for most rows


def without_nan(logits: Tensor) -> Tensor:
    """Minus infinity in their place; the same tensor where there is none."""
    return torch.where(logits.isnan(), float("-inf"), logits) if bool(logits.amax().isnan()) else logits


def weights(logits: Tensor, maximum: Tensor, inverse_temperature: Tensor) -> Tensor:
    """logits float32 [R, V], maximum (of each row) and inverse_temperature float32 [R]. int64 [R, V] in 0..2^40.

    The largest logit's is 2^40. A NaN weighs nothing; a row without a finite maximum is all zeros.
    """
    power = (logits - maximum[:, None]).mul_(inverse_temperature[:, None]).mul_(LOG2_E)
    power.nan_to_num_(nan=LOWEST_POWER, neginf=LOWEST_POWER).clamp_(min=LOWEST_POWER)
    whole = power.floor()
    fraction = power.sub_(whole)
    exp2 = fraction * EXP2_COEFFICIENTS[-1]
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        exp2.add_(coefficient).mul_(fraction)
    scale = whole.add_(_EXPONENT_BIAS + WEIGHT_BITS).int().bitwise_left_shift_(MANTISSA_BITS).view(torch.float32)
    return exp2.add_(1.0).mul_(scale).long()  # a power of two: the product is exact


def truncate(logits: Tensor, weight: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Weights with zeros where a token is not kept; logits have no NaN.

    top_k, top_p int32 [R] and min_p float32 [R] as in params.py.
    """
    vocab_size = logits.shape[1]
    by_count = top_k < vocab_size
    if bool(min_p.any()):
        weight = torch.where(weight >= (min_p * 2.0**WEIGHT_BITS).long()[:, None], weight, 0)
    if bool(by_count.any()):
        count = int(top_k[by_count].amax())
        kth = logits.topk(count, dim=1).values.gather(1, top_k[:, None].clamp(max=count).long() - 1)
        weight = torch.where((logits >= kth) | ~by_count[:, None], weight, 0)
    if bool((top_p >= 0).any()):
        looks = (count, *_FIRST_LOOKS) if bool(by_count.all()) else _FIRST_LOOKS
        least = _top_p_threshold(weight, top_p, [*(look for look in looks if look < vocab_size), vocab_size])
        weight = torch.where(weight >= least[:, None], weight, 0)
    return weight


def _top_p_threshold(weight: Tensor, top_p: Tensor, looks: list[int]) -> Tensor:
    """The largest weight such that those at least as large weigh top_p of all; 1 where that is off. int64 [R].

    So many of the largest are looked at until they weigh enough.
    """
    total = weight.sum(1)
    needed = scale_bits(top_p.clamp(min=0).long(), torch.zeros_like(total), total).clamp(min=1)
    sortable = weight.float()  # exact, weights have 24 digits
    for look in looks:
        most = sortable.topk(look, dim=1).values.long()
        sums = most.cumsum(1)
        if bool((sums[:, -1] >= needed).all()):
            break
    index = torch.searchsorted(sums, needed[:, None]).clamp(max=most.shape[1] - 1)
    return torch.where(top_p >= 0, most.gather(1, index)[:, 0], 1).clamp(min=1)


def draw(weight: Tensor, high: Tensor, low: Tensor, fallback: Tensor) -> Tensor:
    """Inverse of the cumulative weights, in the vocabulary's order, at a uniform number of `philox.uniform_bits`.

    int64 [R]; a row without any weight gets its `fallback`.
    """
    sums = weight.cumsum(1)
    total = sums[:, -1]
    target = scale_bits(high, low, total)
    tokens = torch.searchsorted(sums, target[:, None], right=True)[:, 0]
    return torch.where(total > 0, tokens, fallback)
