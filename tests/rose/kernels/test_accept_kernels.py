"""Acceptance's kernels against its torch reference, bit for bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rose.kernels import accept as kernels
from rose.kernels.sampling_math import TILE
from rose.sampling.distribution import WEIGHT_BITS
from rose.speculation.accept import Places, accept_drawn, accept_draws, by_rows
from tests.rose.speculation.test_accept import spans_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = TILE + 777
RANDOM = torch.Generator().manual_seed(4)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=RANDOM).int()


@pytest.mark.parametrize("k", [1, 3, 4, 7])
def test_draws(k: int) -> None:
    """Most drafts are right; rows have more places than others, or than drafts."""
    counts = ints(k + 1, 40)
    lengths = (counts + ints(2, 40)).clamp(max=k) + 1  # a place more than drafts: of one that was not found
    spans = spans_of(lengths.tolist())
    draws = ints(2, int(lengths.sum()))
    drafts = by_rows(draws, spans, k + 1)[:, :k] ^ (torch.rand(40, k, generator=RANDOM) < 0.2)  # some are wrong
    expected = accept_draws(draws, spans, drafts, counts)
    found = kernels.accept_draws(
        draws.to(DEVICE), spans.cu_seqlens.to(DEVICE), drafts.to(DEVICE), counts.to(DEVICE)
    )  # fmt: skip
    assert torch.equal(found[0].cpu(), expected.tokens)
    assert torch.equal(found[1].cpu(), expected.num_new)
    assert len(expected.num_new.unique()) >= min(k, 4)


def test_counts_with_gaps_are_refused() -> None:
    """A column of a wider tensor, which would be read as if it were dense."""
    k, spans = 2, spans_of([3, 3])
    said = torch.zeros(2, k + 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError, match="read as dense"):
        kernels.accept_draws(said.new_zeros(6), spans.cu_seqlens.to(DEVICE), said[:, :-1], said[:, -1])
    weights, seeds = torch.ones(6, VOCAB, dtype=torch.int64, device=DEVICE), said.new_zeros(6, 2)
    probabilities = torch.ones(2, k, VOCAB, device=DEVICE)
    with pytest.raises(AssertionError, match="read as dense"):
        kernels.accept_drawn(
            weights, seeds, said.new_zeros(6), spans.cu_seqlens.to(DEVICE), said[:, :-1], said[:, -1], probabilities
        )


def random_weights(num_places: int) -> Tensor:
    """A few tokens of most places weigh something, the largest 2^40."""
    weights = (torch.rand(num_places, VOCAB, generator=RANDOM).double() ** 40 * 2.0**WEIGHT_BITS).long()
    weights[:, ::3] = 0
    weights[torch.arange(num_places), ints(VOCAB, num_places).long()] = 1 << WEIGHT_BITS
    return weights


def test_drawn() -> None:
    """Rows whose drafts are drawn from the target's own distribution, from another, and greedy ones."""
    k, num_rows = 3, 12
    counts = torch.tensor([3, 3, 3, 3, 3, 2, 1, 0, 3, 3, 2, 3], dtype=torch.int32)
    spans = spans_of([k + 1] * num_rows)
    weights = random_weights(num_rows * (k + 1))
    greedy = slice(8 * (k + 1), 10 * (k + 1))
    best = weights[greedy].argmax(1)
    weights[greedy] = torch.zeros_like(weights[greedy]).scatter_(1, best[:, None], 1 << WEIGHT_BITS)
    by_row = weights.view(num_rows, k + 1, VOCAB)[:, :k]
    p = by_row.double() / by_row.sum(2, keepdim=True)
    other = random_weights(num_rows * k).view(num_rows, k, VOCAB)
    between = (p + other.double() / other.sum(2, keepdim=True)) / 2
    q = torch.where(torch.arange(num_rows)[:, None, None] % 2 == 0, p, between)
    drafts = q.flatten(0, 1).multinomial(1, generator=RANDOM).view(num_rows, k).int()
    seeds = ints(2**31 - 1, num_rows * (k + 1), 2)
    positions = ints(2**20, num_rows * (k + 1))
    places = Places(positions, positions, positions, spans)
    expected = accept_drawn(weights, seeds, places, drafts, counts, q.float())
    found = kernels.accept_drawn(
        *(x.to(DEVICE) for x in (weights, seeds, positions, spans.cu_seqlens, drafts, counts, q.float()))
    )
    assert torch.equal(found[1].cpu(), expected.num_new)
    assert torch.equal(found[0].cpu(), expected.tokens)
    assert (expected.num_new[::2] == counts[::2] + 1).all()  # p and q are one
    assert (expected.num_new < counts + 1).any()
    assert np.ptp(expected.tokens.numpy()) > TILE  # in either tile
