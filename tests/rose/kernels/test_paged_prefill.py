"""Chunks of prompts over a paged cache against torch's attention over the same keys in a row."""

import pytest
import torch
from torch import Tensor

from rose.kernels.paged_prefill import paged_prefill
from rose.kernels.ragged_attention import Tiles
from tests.rose.kernels.test_paged_attention import DEVICE, DTYPE, Paged

TILES = Tiles(16, 16, 4, 2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def prefill(paged: Paged, *, min_q_len: int = 1, tiles: Tiles | None = TILES, out: Tensor | None = None) -> Tensor:
    return paged_prefill(
        paged.q, paged.k, paged.v, paged.cu_seqlens_q, paged.kv_lengths, paged.table,
        scale=paged.q.shape[-1] ** -0.5, min_q_len=min_q_len, tiles=tiles, out=out,
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "head_dim"), [((2, 1), 64), ((3, 1), 32), ((1, 1), 128)])
def test_chunks_with_and_without_cached_context(heads: tuple[int, int], head_dim: int) -> None:
    """First chunks, later ones, single tokens and empty rows; edges of tiles and blocks."""
    q_lengths, kv_lengths = [33, 16, 1, 0, 7], [33, 50, 40, 9, 16]
    paged = Paged(q_lengths, kv_lengths, heads, head_dim, DTYPE)
    paged.check(prefill(paged), rows=[0, 1, 2, 4])


def test_rows_without_keys_are_zero() -> None:
    """As nobody's are, which fill up a step of rows with many drafts."""
    paged = Paged([9, 9, 9], [0, 40, 0], (2, 1), 32, DTYPE)
    out = prefill(paged)
    paged.check(out, rows=[1])
    assert (out[:9] == 0).all()
    assert (out[18:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
def test_the_default_launch(dtype: torch.dtype) -> None:
    paged = Paged([70, 3], [75, 140], (1, 1), 32, dtype)
    paged.check(prefill(paged, tiles=None), rows=[0, 1])


def test_short_rows_are_left_alone_and_padding_is_zero() -> None:
    """With rose.kernels.paged_attention for the others every row is computed once."""
    paged = Paged([1, 20, 4, 5], [30, 25, 4, 44], (2, 1), 32, DTYPE)
    rows = int(paged.cu_seqlens_q[-1])
    paged.q = torch.cat([paged.q, torch.full((6, *paged.q.shape[1:]), float("nan"), dtype=DTYPE, device=DEVICE)])
    out = torch.full(paged.q.shape, 7.0, dtype=DTYPE, device=DEVICE)
    prefill(paged, min_q_len=5, out=out)
    paged.check(out, rows=[1, 3])
    assert (out[:1] == 7.0).all()
    assert (out[21:25] == 7.0).all()
    assert (out[rows:] == 0).all()
    paged.decode(4, out=out)
    paged.check(out, rows=[0, 1, 2, 3])
