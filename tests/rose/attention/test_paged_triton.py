"""Triton attention over a paged cache behind the interface, against the reference backend: results and caches."""

import pytest
import torch

from rose.attention.interface import AttentionShape
from rose.attention.paged import AppendsBefore, PagedKV, PagedRows
from rose.attention.paged_reference import ReferencePagedBackend
from rose.attention.paged_triton import TritonPagedBackend
from rose.kernels.kv_append import kv_append

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE, NUM_BLOCKS = 16, 12
SHAPE = AttentionShape(4, 2, 32, 32**-0.5, True)


def paged_rows(q_lengths: list[int], kv_lengths: list[int]) -> PagedRows:
    """Blocks in any order; each row's new tokens go to the end of its keys."""
    order = torch.randperm(NUM_BLOCKS).tolist()
    table = torch.full((len(q_lengths), 5), NUM_BLOCKS, dtype=torch.int32)
    places = []
    for row, (q_length, kv_length) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        for index in range(-(-kv_length // BLOCK_SIZE)):
            table[row, index] = order.pop()
        for position in range(kv_length - q_length, kv_length):
            places += [int(table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE]
    return PagedRows(
        cu_seqlens_q=torch.tensor([0, *q_lengths]).cumsum(0).to(DEVICE, torch.int32),
        kv_lengths=torch.tensor(kv_lengths, dtype=torch.int32, device=DEVICE),
        block_table=table.to(DEVICE),
        slot_mapping=torch.tensor(places, dtype=torch.int32, device=DEVICE),
        max_q_len=max(q_lengths),
        max_kv_len=max(kv_lengths),
    )


@pytest.mark.parametrize("q_lengths", [[1, 3], [1, 20], [17]])
def test_what_lies_in_its_place_already_is_not_appended(q_lengths: list[int]) -> None:
    """The same bits as from a call that appends; the next call appends again."""
    torch.manual_seed(0)
    rows, backend = paged_rows(q_lengths, [33, 48][-len(q_lengths) :]), TritonPagedBackend()
    content = torch.randn(2, 2, NUM_BLOCKS + 1, BLOCK_SIZE, 2, 32, device=DEVICE).half()
    caches = [[PagedKV(*layer) for layer in content.clone()] for _ in range(2)]
    before, plain = (backend.paged(rows, cache) for cache in caches)
    assert isinstance(before, AppendsBefore)
    for layer in (0, 1, 0):
        q, k, v = torch.randn(sum(q_lengths), 8, 32, device=DEVICE).half().split((4, 2, 2), dim=1)
        given = k, v
        if layer == 0:
            kv_append(k, v, *before.append_before())
            given = k * torch.nan, v * torch.nan
        assert torch.equal(before(q, *given, SHAPE), plain(q, k, v, SHAPE))
        assert torch.equal(caches[0][layer].k, caches[1][layer].k)
        assert torch.equal(caches[0][layer].v, caches[1][layer].v)


def test_passes_share_counters() -> None:
    backend, cache = TritonPagedBackend(), [PagedKV(*torch.zeros(2, NUM_BLOCKS + 1, BLOCK_SIZE, 2, 32, device=DEVICE))]
    rows = paged_rows([1], [20])
    assert backend.paged(rows, cache)._counters is backend.static(rows, cache, SHAPE)._counters


@pytest.mark.parametrize("q_lengths", [[1, 1, 1, 1], [3, 3, 3, 3], [1, 20, 5, 9], [17]])
def test_same_as_the_reference(q_lengths: list[int]) -> None:
    torch.manual_seed(0)
    rows = paged_rows(q_lengths, [17, 33, 5, 48][-len(q_lengths) :])
    caches = [
        [PagedKV(*torch.randn(2, NUM_BLOCKS + 1, BLOCK_SIZE, 2, 32, device=DEVICE).half()) for _ in range(2)]
        for _ in range(2)
    ]
    for mine, reference in zip(*caches, strict=True):
        mine.k.copy_(reference.k)
        mine.v.copy_(reference.v)
    mine, reference = (
        backend.paged(rows, cache)
        for backend, cache in zip((TritonPagedBackend(), ReferencePagedBackend()), caches, strict=True)
    )
    for layer in range(2):
        packed = torch.randn(sum(q_lengths), 8 * 32, device=DEVICE).half()
        q, k, v = packed.unflatten(-1, (8, 32)).split((4, 2, 2), dim=1)
        torch.testing.assert_close(mine(q, k, v, SHAPE), reference(q, k, v, SHAPE), atol=3e-3, rtol=3e-3)
        assert torch.equal(caches[0][layer].k, caches[1][layer].k)
        assert torch.equal(caches[0][layer].v, caches[1][layer].v)
