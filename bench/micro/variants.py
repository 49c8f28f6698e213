"""Shapes and launch variants that are compiled and timed: the Qwen3-0.6B matrices, and attention tiles."""

from typing import NamedTuple

from rose.kernels.ragged_attention import Tiles as AttentionTiles
from rose.kernels.skinny_gemm import Epilogue, Tiles


class Gemm(NamedTuple):
    """One matrix of a layer: weight [rows, k]; norm_eps: RMSNorm is folded in."""

    name: str
    rows: int
    k: int
    epilogue: Epilogue
    norm_eps: float | None


GEMMS = (
    Gemm("qkv", 4096, 1024, "none", 1e-6),
    Gemm("o", 1024, 2048, "residual", None),
    Gemm("gate_up", 6144, 1024, "silu_mul", 1e-6),
    Gemm("down", 1024, 3072, "residual", None),
)


def gemm_tiles(name: str) -> list[Tiles]:
    """Variants worth timing, by matrix."""
    return {
        "qkv": [Tiles(64, 64, 64, 1, 4, 5), Tiles(64, 64, 128, 1, 4, 4), Tiles(128, 32, 64, 1, 4, 5),
                Tiles(128, 64, 64, 1, 4, 5), Tiles(128, 128, 64, 1, 8, 4)],
        "o": [Tiles(64, 64, 128, 4, 4, 4), Tiles(64, 32, 128, 2, 4, 4), Tiles(64, 64, 64, 4, 4, 5),
              Tiles(128, 32, 64, 4, 4, 5), Tiles(64, 64, 64, 1, 4, 6)],
        "gate_up": [Tiles(64, 64, 64, 1, 4, 4), Tiles(64, 32, 64, 1, 4, 4), Tiles(128, 32, 64, 1, 4, 4),
                    Tiles(128, 32, 64, 1, 8, 4), Tiles(128, 64, 64, 1, 8, 4)],
        "down": [Tiles(64, 64, 128, 4, 4, 4), Tiles(64, 32, 128, 2, 4, 4), Tiles(64, 64, 64, 4, 4, 5),
                 Tiles(128, 32, 64, 4, 4, 5), Tiles(64, 64, 64, 1, 4, 6)],
    }[name]  # fmt: skip


def attention_tiles(head_dim: int) -> list[AttentionTiles]:
    """Variants worth timing, by head dimension."""
    if head_dim <= 64:
        return [AttentionTiles(64, 64, 4, 3), AttentionTiles(128, 64, 4, 3), AttentionTiles(128, 128, 8, 2),
                AttentionTiles(64, 32, 4, 3), AttentionTiles(128, 64, 8, 3)]  # fmt: skip
    return [AttentionTiles(64, 64, 4, 2), AttentionTiles(128, 64, 8, 3), AttentionTiles(128, 128, 8, 2),
            AttentionTiles(64, 64, 4, 3), AttentionTiles(64, 32, 4, 3)]  # fmt: skip


ROPE_TILES = (AttentionTiles(64, 64, 4, 2), AttentionTiles(64, 32, 4, 2), AttentionTiles(32, 32, 4, 2))
