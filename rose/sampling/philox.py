"""Philox4x32-10, a counter-based random number generator, in torch integers; the same bits as rose/kernels/sampling.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A draw is a function of
(seed, position, stream) alone: no state, no order, no batch. The counter's words:
    0  position of the token that is drawn
    1  stream: what the draw is for, STREAM_...; the rest are for uses to come
    2, 3  zero
The key is the seed's low and high word.
"""

import torch
from torch import Tensor

STREAM_TOKEN = 0  # the token itself
STREAM_ACCEPT, STREAM_RESAMPLE, STREAM_DRAFT = 1, 2, 3  # speculation: accept or not, the residual's draw, the draft's

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words from a counter of four and a key of two; each int64 [N] holding 32 unsigned bits."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        product_a, product_c = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # they wrap; the 64 bits are right
        a, b, c, d = (
            (product_c >> 32 & _WORD) ^ b ^ low,
            product_c & _WORD,
            (product_a >> 32 & _WORD) ^ d ^ high,
            product_a & _WORD,
        )
        low, high = (low + WEYL[0]) & _WORD, (high + WEYL[1]) & _WORD
    return a, b, c, d


def uniform_bits(seed_low: Tensor, seed_high: Tensor, positions: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """One uniform number in [0, 1) of 62 bits each, as two words of 31 bits, int64 [N]: (high · 2^31 + low) / 2^62.

    All int32 [N].
    """
    zero = torch.zeros_like(positions, dtype=torch.int64)
    words = philox(
        (positions.long() & _WORD, zero + stream, zero, zero), (seed_low.long() & _WORD, seed_high.long() & _WORD)
    )
    return words[0] >> 1, words[1] >> 1


def scale_bits(high: Tensor, low: Tensor, n: Tensor) -> Tensor:
    """floor(n · (high · 2^31 + low) / 2^62), exact; n int64 below 2^59."""
    n_high, n_low = n >> 31, n & 0x7FFFFFFF
    return high * n_high + ((high * n_low + low * n_high + (low * n_low >> 31)) >> 31)
