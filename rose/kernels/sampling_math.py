"""What the kernels of sampling share: keys in the order of logits, integer weights, the generator of random numbers.

Bit for bit the functions of rose/sampling/distribution.py and philox.py. Kernels that use `weight` are launched with
`EXACT`, so that no multiplication is fused with an addition.
"""

import triton
import triton.language as tl

from rose.sampling.distribution import EXP2_COEFFICIENTS, LOG2_E, LOWEST_POWER, MANTISSA_BITS, WEIGHT_BITS
from rose.sampling.params import NUM_COLUMNS
from rose.sampling.philox import MULTIPLIERS, ROUNDS, WEYL

TILE = 4096  # logits that one program looks at
NUM_WARPS = 8
EXACT = {"enable_fp_fusion": False, "num_warps": NUM_WARPS}

COLUMNS = tl.constexpr(NUM_COLUMNS)
NO_KEY = tl.constexpr(-(2**63))  # below every key
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(coefficient) for coefficient in EXP2_COEFFICIENTS)
_LOG2_E, _LOWEST = tl.constexpr(LOG2_E), tl.constexpr(LOWEST_POWER)
_MANTISSA, _SHIFT = tl.constexpr(2.0**MANTISSA_BITS), tl.constexpr(WEIGHT_BITS - MANTISSA_BITS)
_WORD = tl.constexpr(0xFFFFFFFF)
_M0, _M1 = (tl.constexpr(word) for word in MULTIPLIERS)
_W0, _W1 = (tl.constexpr(word) for word in WEYL)
_ROUNDS = tl.constexpr(ROUNDS)
_ID_BITS = tl.constexpr(0x7FFFFFFF)  # ids are kept inverted, so that the lower one is the larger key


@triton.jit
def line_of(slots_ptr, row, max_num_seqs):
    """The row's line in the slots' tables; padding rows have the last."""
    slot = tl.load(slots_ptr + row)
    return tl.where((slot < 0) | (slot > max_num_seqs), max_num_seqs, slot).to(tl.int64)


@triton.jit
def order_of(x):
    """int32 in the order of float32 (no NaN); 0.0 and -0.0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _ID_BITS)


@triton.jit
def keys_of(x, column):
    """int64 in the order of (logit, lower column first); a NaN comes last."""
    x = tl.where(x == x, x, float("-inf"))
    return (order_of(x).to(tl.int64) << 32) | (column ^ _ID_BITS)


@triton.jit
def key_id(key):
    return ((key & _ID_BITS) ^ _ID_BITS).to(tl.int32)


@triton.jit
def key_logit(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & _ID_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def weight(x, maximum, inverse_temperature):
    """int64 in 0..2^40."""
    power = (x - maximum) * inverse_temperature * _LOG2_E
    power = tl.where(power > _LOWEST, power, _LOWEST)
    whole = tl.floor(power)
    fraction = power - whole
    exp2 = fraction * _C5
    exp2 = (exp2 + _C4) * fraction
    exp2 = (exp2 + _C3) * fraction
    exp2 = (exp2 + _C2) * fraction
    exp2 = (exp2 + _C1) * fraction
    exp2 = (exp2 + _C0) * fraction
    mantissa = ((exp2 + 1.0) * _MANTISSA).to(tl.int32).to(tl.int64)
    return (mantissa << _SHIFT) >> (-whole).to(tl.int32).to(tl.int64)


@triton.jit
def uniform_bits(seed_low, seed_high, position, stream):
    """Two words of 31 random bits, int64; arguments int32."""
    a, c = position.to(tl.int64) & _WORD, position.to(tl.int64) * 0
    b, d = c + stream, c
    low, high = seed_low.to(tl.int64) & _WORD, seed_high.to(tl.int64) & _WORD
    for _ in tl.static_range(_ROUNDS):
        product_a, product_c = _product(a, _M0), _product(c, _M1)
        a, c = (product_c >> 32 & _WORD) ^ b ^ low, (product_a >> 32 & _WORD) ^ d ^ high
        b, d = product_c & _WORD, product_a & _WORD
        low, high = (low + _W0) & _WORD, (high + _W1) & _WORD
    return a >> 1, b >> 1


@triton.jit
def _product(a, multiplier: tl.constexpr):
    """64 bits of the product of two 32-bit words."""
    return (a.to(tl.uint64) * multiplier).to(tl.int64)


@triton.jit
def scale_bits(high, low, n):
    """floor(n · (high · 2^31 + low) / 2^62)."""
    n_high, n_low = n >> 31, n & _ID_BITS
    return high * n_high + ((high * n_low + low * n_high + (low * n_low >> 31)) >> 31)
