"""A matrix product of few rows, its depth split into a batch of products: more programs read the weight at once.

The partial sums are left to whoever reads them next (`add_rms_norm` adds them), so no kernel is launched to add them.
Rounded to 16 bit each, they are together as exact as one rounding of the sum: P parts of variance 1/P.
"""

import torch
from torch import Tensor

_PROGRAMS = 160  # a little over the 132 multiprocessors of an H200
_TILE = 64  # rows and columns that a program of a skinny product is taken to do
_MIN_DEPTH = 256
_MAX_WEIGHT = 8 << 20  # values of a weight for which this was measured to win


def num_parts(num_rows: int, num_columns: int, depth: int) -> int:
    """Parts of a [num_rows, depth] · [depth, num_columns] product: as many as fill the device. 1: do not split."""
    if num_columns * depth > _MAX_WEIGHT:
        return 1
    programs = -(-num_rows // _TILE) * -(-num_columns // _TILE)
    parts = 1
    while programs * parts * 2 <= _PROGRAMS and depth % (parts * 2) == 0 and depth // (parts * 2) >= _MIN_DEPTH:
        parts *= 2
    return parts


def split_product(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """x [M, K] · weight [N, K]ᵀ as `parts` partial sums [parts, M, N]; parts divides K. Nothing is copied."""
    depth = x.shape[1] // parts
    return torch.bmm(
        x.unflatten(1, (parts, depth)).transpose(0, 1), weight.unflatten(1, (parts, depth)).permute(1, 2, 0)
    )
