"""The reference of paged attention against plain products in float64, NaN in every place that is nobody's."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rose.attention.interface import AttentionShape
from rose.attention.paged import PagedKV, PagedRows
from rose.attention.paged_reference import FEW_TOKENS, ReferencePagedBackend

BLOCK_SIZE, NUM_LAYERS = 4, 2


class Case:
    """Rows of (new tokens, all tokens); the cache holds NaN but for what the rows computed before."""

    def __init__(
        self, rows: list[tuple[int, int]], shape: AttentionShape, max_blocks: int = 40, *, side_by_side: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.rows, self.shape = rows, shape
        num_blocks = sum(-(-length // BLOCK_SIZE) for _, length in rows) + 3
        free = list(reversed(range(num_blocks))) if side_by_side else torch.randperm(num_blocks).tolist()
        size = (num_blocks + 1, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.caches = [PagedKV(torch.full(size, torch.nan), torch.full(size, torch.nan)) for _ in range(NUM_LAYERS)]
        self.table = torch.full((len(rows), max_blocks), num_blocks, dtype=torch.int32)
        self.keys = [torch.randn(2, NUM_LAYERS, n, shape.num_kv_heads, shape.head_dim) for _, n in rows]
        self.queries = torch.randn(NUM_LAYERS, sum(q for q, _ in rows), shape.num_heads, shape.head_dim)
        places = []
        for row, (q, length) in enumerate(rows):
            blocks = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
            self.table[row, : len(blocks)] = torch.tensor(blocks)
            place = torch.tensor([blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(length)])
            for layer, cache in enumerate(self.caches):
                for part, both in zip(cache, self.keys[row], strict=True):
                    part.flatten(0, 1)[place[: length - q]] = both[layer, : length - q]
            places.append(place[length - q :])
        self.slot_mapping = torch.cat(places).int()

    def run(self) -> list[Tensor]:
        """Each layer's output [T, heads, head_dim]."""
        rows = self.rows
        offsets = torch.tensor([0, *(q for q, _ in rows)]).cumsum(0).int()
        lengths = torch.tensor([length for _, length in rows]).int()
        paged = PagedRows(
            offsets, lengths, self.table, self.slot_mapping, max(q for q, _ in rows), max(n for _, n in rows)
        )
        attend = ReferencePagedBackend().paged(paged, self.caches)
        new = [torch.cat([k[:, :, n - q :] for k, (q, n) in zip(self.keys, rows, strict=True)], dim=2)][0]
        return [attend(self.queries[i], new[0, i], new[1, i], self.shape) for i in range(NUM_LAYERS)]

    def expected(self) -> list[Tensor]:
        shape, outputs = self.shape, []
        offsets = torch.tensor([0, *(q for q, _ in self.rows)]).cumsum(0).tolist()
        for layer in range(NUM_LAYERS):
            parts = []
            for (q, length), both, (begin, end) in zip(self.rows, self.keys, pairwise(offsets), strict=True):
                queries = self.queries[layer, begin:end].double()
                k, v = both[:, layer].double().repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=2)
                scores = torch.einsum("qhd,khd->hqk", queries, k) * shape.scale
                seen = torch.arange(length) <= torch.arange(length - q, length)[:, None]
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                parts.append(torch.einsum("hqk,khd->qhd", weights, v))
            outputs.append(torch.cat(parts))
        return outputs


MANY = FEW_TOKENS + 5


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (6, 1)], ids=["no groups", "9 of 3", "6 of 1"])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(1, 37)],
        [(1, 3), (1, 4), (1, 5), (1, 6), (1, 7)],
        [(1, 2), (1, 90), (1, 17), (1, 100), (1, 1)],
        [(5, 9), (5, 12), (5, 5), (5, 44)],
        [(MANY, MANY)],
        [(MANY, 60), (MANY, MANY), (16, 32)],
        [(1, 9), (MANY, 61), (3, 11), (1, 5), (FEW_TOKENS, 24), (3, 8), (1, 140)],
    ],
    ids=["first", "decode", "one block", "ragged", "verify", "prompt", "chunks", "all kinds"],
)
def test_against_plain_products(rows: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    shape = AttentionShape(*heads, head_dim=16, scale=0.3, causal=True)
    case = Case(rows, shape)
    for output, expected in zip(case.run(), case.expected(), strict=True):
        torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "rows", [[(1, 1)], [(1, 38)], [(MANY, 20), (1, 23)]], ids=["first", "decode", "beside a prompt"]
)
def test_blocks_that_lie_side_by_side(rows: list[tuple[int, int]]) -> None:
    case = Case(rows, AttentionShape(6, 2, 16, 0.3, True), side_by_side=True)
    for output, expected in zip(case.run(), case.expected(), strict=True):
        torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=1e-5)


def test_new_keys_are_in_the_cache_and_nothing_else_changes() -> None:
    case = Case([(1, 6), (MANY, 30), (3, 9)], AttentionShape(4, 2, 16, 0.25, True))
    before = [cache.k.flatten(0, 1).clone() for cache in case.caches]
    case.run()
    written = case.slot_mapping.long()
    for layer, cache in enumerate(case.caches):
        now = cache.k.flatten(0, 1)
        new = torch.cat([k[0, layer, n - q :] for k, (q, n) in zip(case.keys, case.rows, strict=True)])
        assert torch.equal(now[written], new)
        others = torch.ones(len(now), dtype=torch.bool).index_fill_(0, written, False)
        torch.testing.assert_close(now[others], before[layer][others], rtol=0, atol=0, equal_nan=True)


def test_a_row_without_tokens_takes_no_part() -> None:
    shape = AttentionShape(4, 2, 16, 0.25, True)
    case = Case([(1, 6), (2, 9)], shape)
    expected = case.expected()
    case.rows = [(1, 6), (0, 5), (2, 9)]
    case.keys.insert(1, case.keys[0][:, :, :5])
    case.table = case.table[[0, 0, 1]]
    for output, wanted in zip(case.run(), expected, strict=True):
        torch.testing.assert_close(output.double(), wanted, atol=2e-6, rtol=1e-5)
