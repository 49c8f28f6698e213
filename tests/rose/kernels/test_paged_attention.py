"""Attention over a paged cache against torch's over the same keys in a row: few queries, and whole chunks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.paged_attention import MAX_SHORT, Splits, default_splits, new_counters, paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BLOCK_SIZE = 4
FEW = Splits(4, 16, 16, 4, 2)


class Paged:
    """Rows with random keys and values, scattered over the blocks of a cache; everything else in it is NaN."""

    def __init__(
        self, q_lengths: list[int], kv_lengths: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
    ) -> None:
        num_heads, num_kv_heads = heads
        self.q_lengths, self.lengths = q_lengths, kv_lengths
        num_tokens, num_rows = sum(q_lengths), len(q_lengths)
        packed = torch.randn(num_tokens, (num_heads + 2) * head_dim, device=DEVICE).to(dtype)
        self.q = packed[:, : num_heads * head_dim].unflatten(-1, (-1, head_dim))
        max_blocks = max(1, -(-max(kv_lengths) // BLOCK_SIZE))
        num_blocks = num_rows * max_blocks
        shape = (num_blocks + 1, BLOCK_SIZE, num_kv_heads, head_dim)
        self.k, self.v = (torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
        self.table = torch.full((num_rows, max_blocks), num_blocks, dtype=torch.int32, device=DEVICE)
        order = torch.randperm(num_blocks).tolist()
        self.keys, self.values = [], []
        for row, length in enumerate(kv_lengths):
            blocks = [order.pop() for _ in range(-(-length // BLOCK_SIZE))]
            self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            for kept, cache in ((self.keys, self.k), (self.values, self.v)):
                kept.append(torch.randn(length, num_kv_heads, head_dim, device=DEVICE).to(dtype))
                for position in range(length):
                    cache[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = kept[-1][position]
        self.cu_seqlens_q = torch.tensor([0, *q_lengths], device=DEVICE).cumsum(0).to(torch.int32)
        self.kv_lengths = torch.tensor(kv_lengths, dtype=torch.int32, device=DEVICE)

    def expected(self, row: int) -> Tensor:
        """Float32 [q_len, heads, head_dim]."""
        start, count, length = int(self.cu_seqlens_q[row]), self.q_lengths[row], self.lengths[row]
        q, k, v = (
            x.float().cpu().transpose(0, 1) for x in (self.q[start : start + count], self.keys[row], self.values[row])
        )
        seen = torch.arange(length)[None] <= length - count + torch.arange(count)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)

    def check(self, out: Tensor, rows: list[int]) -> None:
        tolerance = TOLERANCE[out.dtype]
        for row in rows:
            start = int(self.cu_seqlens_q[row])
            got = out[start : start + self.q_lengths[row]].float().cpu()
            torch.testing.assert_close(got, self.expected(row), atol=tolerance, rtol=tolerance)

    def decode(
        self,
        max_q_len: int,
        splits: Splits | None = FEW,
        out: Tensor | None = None,
        counters: Tensor | None = None,
    ) -> Tensor:
        return paged_attention(
            self.q, self.k, self.v, self.cu_seqlens_q, self.kv_lengths, self.table,
            scale=self.q.shape[-1] ** -0.5, max_q_len=max_q_len, splits=splits, out=out,
            counters=counters,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("heads", "head_dim", "num_queries"),
    [((4, 2), 64, 1), ((2, 2), 128, 1), ((3, 1), 32, 2), ((2, 1), 128, 3), ((4, 1), 64, 4), ((8, 1), 32, 5)],
)
def test_decode_and_verify(heads: tuple[int, int], head_dim: int, num_queries: int) -> None:
    """Rows of one part and of several, ends within blocks and at their edges, the rest of the cache NaN."""
    lengths = [num_queries, 16 + num_queries, 32, 91]
    paged = Paged([num_queries] * 4, lengths, heads, head_dim, DTYPE)
    paged.check(paged.decode(num_queries), rows=list(range(4)))


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
def test_one_program_a_row_and_the_default_launch(dtype: torch.dtype) -> None:
    paged = Paged([2] * 3, [2, 40, 150], (2, 1), 32, dtype)
    paged.check(paged.decode(2, Splits(1, 16, 16, 4, 2)), rows=[0, 1, 2])
    paged.check(paged.decode(2, None), rows=[0, 1, 2])


@pytest.mark.parametrize("num_queries", [1, 5])
def test_the_default_launch_of_large_heads(num_queries: int) -> None:
    """One query, and as many that their heads are two tiles of rows."""
    paged = Paged([num_queries] * 2, [num_queries, 300], (4, 1), 128, DTYPE)
    paged.check(paged.decode(num_queries, None), rows=[0, 1])


def test_other_lengths_under_the_same_launch() -> None:
    """What a captured graph does; an empty row stands for a sequence that pads the batch, and comes out zero."""
    paged = Paged([1] * 4, [60, 61, 62, 90], (2, 1), 32, DTYPE)
    keys, values = paged.keys, paged.values
    for lengths in ([60, 61, 62, 90], [1, 2, 3, 4], [50, 1, 17, 0], [0, 0, 0, 80]):
        paged.lengths = lengths
        paged.kv_lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        paged.keys, paged.values = ([x[:n] for x, n in zip(xs, lengths, strict=True)] for xs in (keys, values))
        out = paged.decode(1)
        paged.check(out, rows=[row for row, length in enumerate(lengths) if length])
        assert all((out[row] == 0).all() for row, length in enumerate(lengths) if not length)


@pytest.mark.parametrize("num_queries", [1, 2, 3, 4, 5])
def test_launches_share_counters(num_queries: int) -> None:
    """As layers, steps and replays do: rows without keys, of one part, of some and of all; the same bits in each. What
    was in `out` or in parts before is NaN."""
    lengths = [0, num_queries, 91, 290]
    paged = Paged([num_queries] * 4, lengths, (3, 1), 32, DTYPE)
    counters = new_counters(paged.q.device)
    found = []
    for splits in (FEW, Splits(32, 16, 16, 4, 2), FEW):
        out = torch.full(paged.q.shape, float("nan"), dtype=DTYPE, device=DEVICE)
        found.append(paged.decode(num_queries, splits, out=out, counters=counters))
        paged.check(out, rows=[1, 2, 3])
        assert (out[:num_queries] == 0).all()
        assert not counters.any(), "the next launch counts from zero"
    assert torch.equal(found[0], found[2])


def test_ragged_rows_share_counters() -> None:
    """Of a step with prompts: rows that are left alone, or have no query, count nothing."""
    paged = Paged([1, 11, 3, 0, 5, 2], [90, 40, 33, 60, 5, 200], (3, 1), 64, DTYPE)
    counters = new_counters(paged.q.device)
    for max_q_len in (5, 3, 5):
        out = torch.full(paged.q.shape, 7.0, dtype=DTYPE, device=DEVICE)
        paged.decode(max_q_len, out=out, counters=counters)
        paged.check(out, rows=[row for row in (0, 2, 4, 5) if paged.q_lengths[row] <= max_q_len])
        assert (out[1:12] == 7.0).all()
        assert not counters.any()


def test_more_rows_than_counters_are_not_divided() -> None:
    paged = Paged([1] * 3, [60, 7, 93], (4, 2), 32, DTYPE)
    counters = new_counters(paged.q.device)
    for few in (counters[:5], counters[:6]):
        paged.check(paged.decode(1, counters=few), rows=[0, 1, 2])


def test_rows_of_many_queries_are_left_alone() -> None:
    paged = Paged([1, 11, 3, 0, 1], [40, 11, 33, 5, 60], (2, 1), 32, DTYPE)
    out = torch.full(paged.q.shape, 7.0, dtype=DTYPE, device=DEVICE)
    paged.decode(3, out=out)
    paged.check(out, rows=[0, 2, 4])
    assert (out[1:12] == 7.0).all()


def test_a_bad_row_hurts_only_itself() -> None:
    paged = Paged([1] * 3, [60, 60, 60], (2, 1), 32, DTYPE)
    paged.v[paged.table[1, 2]] = float("nan")
    out = paged.decode(1)
    assert out[1].isnan().all()
    paged.check(out, rows=[0, 2])


def test_repeats_are_bit_identical() -> None:
    paged = Paged([2] * 3, [60, 7, 93], (2, 1), 32, DTYPE)
    first = paged.decode(2)
    assert torch.equal(paged.decode(2), first)


@pytest.mark.parametrize(
    ("num_kv_heads", "num_rows", "narrow", "wide"),
    [
        (8, 1, (32, 64, 64, 4, 4), (32, 64, 64, 4, 4)),
        (8, 4, (8, 128, 64, 4, 4), (8, 128, 64, 4, 4)),
        (8, 8, (4, 128, 64, 4, 4), (4, 128, 64, 4, 4)),
        (8, 16, (4, 4096, 128, 4, 3), (4, 256, 64, 4, 3)),
        (8, 32, (4, 4096, 64, 4, 4), (4, 4096, 64, 4, 3)),
        (8, 128, (4, 4096, 32, 4, 4), (4, 4096, 64, 4, 3)),
        (1, 16, (32, 64, 64, 4, 4), (32, 64, 64, 4, 4)),
        (1, 32, (8, 128, 64, 4, 4), (8, 128, 64, 4, 4)),
    ],
)
def test_default_splits(num_kv_heads: int, num_rows: int, narrow: tuple[int, ...], wide: tuple[int, ...]) -> None:
    """Those measured best, for one query and for five: fewer and longer parts the more there is to do."""
    for tile_rows, expected in ((16, narrow), (32, wide), (64, wide)):
        assert default_splits(num_rows, num_kv_heads, 128, 1 << 17, tile_rows) == Splits(*expected)


def test_default_splits_of_short_limits_and_small_heads() -> None:
    """A function of what a graph is captured for."""
    assert default_splits(1, 8, 128, 1000, 16).num_splits == 16
    assert default_splits(128, 8, 128, 512, 16).num_splits == 1
    assert default_splits(128, 8, 128, 1 << 15, 16).num_splits == 4, "a long row among many is divided"
    assert default_splits(1, 3, 64, 1 << 17, 16) == Splits(64, 64, 64, 4, 3)
    assert MAX_SHORT >= 5, "one token and four drafts"
