"""Shapes and launch variants that are compiled and timed: the Qwen3-0.6B matrices, and attention tiles."""

from typing import NamedTuple

from rose.kernels.few_rows import Block
from rose.kernels.ragged_attention import Tiles

EPS = 1e-6


class Gemm(NamedTuple):
    """One matrix of a layer, weight [columns, depth], and what stands around it: `norm before` (x is normalised first),
    `swiglu` (that, and the two halves of the columns are gate and up), `norm after` (the residual is added, then
    normalised)."""

    name: str
    columns: int
    depth: int
    around: str


GEMMS = (
    Gemm("qkv", 4096, 1024, "norm before"),
    Gemm("o", 1024, 2048, "norm after"),
    Gemm("gate_up", 6144, 1024, "swiglu"),
    Gemm("down", 1024, 3072, "norm after"),
)
PARTS = (2, 4, 8)  # of a product's depth
TILED_BLOCKS = (
    Block(16, 256, 2, 4, 4, tiled=True),
    Block(16, 512, 2, 3, 2, tiled=True),
    Block(64, 128, 4, 4, 2, tiled=True),
)
PLAIN_BLOCKS = (
    Block(4, 1024, 4, 3, 0),
    Block(8, 1024, 4, 3, 2),
    Block(4, 512, 2, 4, 2),
    Block(4, 256, 1, 5, 4),
)


def attention_tiles(head_dim: int, length: int) -> list[Tiles]:
    """Variants worth timing, by head dimension and length of the sequences."""
    tiles = [Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 3)]
    if length <= 128:
        return [*tiles, Tiles(32, 32, 4, 3), Tiles(32, 32, 2, 3), Tiles(32, 64, 4, 3), Tiles(16, 64, 4, 3)]
    if head_dim <= 64:
        return [*tiles, Tiles(128, 64, 8, 3), Tiles(64, 128, 4, 3)]
    return [*tiles, Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2)]


def rope_tiles(length: int) -> list[Tiles]:
    """With norm and rotation in flight: few rows, so that many programs share the keys' turning; all keys at once."""
    if length <= 32:
        return [Tiles(32, 32, 4, 1)]
    return [Tiles(32, 128, 8, 1), Tiles(16, 128, 8, 1)]
