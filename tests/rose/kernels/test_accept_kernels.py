"""Acceptance's kernels against its torch reference, bit for bit."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ipc.types import SamplingParams
from rose.kernels import accept as kernels
from rose.kernels.sampling import TritonOps
from rose.kernels.sampling_choose import MAX_LISTED
from rose.kernels.sampling_kept import kept
from rose.kernels.sampling_math import TILE
from rose.sampling.params import Needs
from rose.sampling.reference import TorchOps
from rose.sampling.sampler import Sampler, SamplingOps
from rose.speculation.accept import Places, accept_draws, by_rows, verify
from tests.rose.speculation.test_accept import spans_of

# the interpreter says aloud what infinities do
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

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
    sampler = make_sampler(2, TritonOps(), DEVICE)
    each = kept(torch.zeros(6, VOCAB, device=DEVICE), sampler.state, said.new_zeros(6), Needs())
    at = kernels.DrawnAt(said.new_zeros(6), said.new_zeros(6), spans.cu_seqlens.to(DEVICE))
    with pytest.raises(AssertionError, match="read as dense"):
        kernels.accept_drawn(each, sampler.state, at, said[:, :-1], said[:, -1], torch.ones(2, k, VOCAB, device=DEVICE))


PARAMS = (
    {},
    {"temperature": 0.0},
    {"top_p": 0.7, "temperature": 1.3},
    {"top_k": 40},
    {"min_p": 0.2},
    {"temperature": 0.6},
)


def make_sampler(num_rows: int, ops: SamplingOps, device: torch.device) -> Sampler:
    """A slot a row, their parameters in turn."""
    sampler = Sampler(
        max_num_seqs=num_rows, vocab_size=VOCAB, max_logprobs=0, eos_token_ids=(1,), device=device, ops=ops
    )
    for slot in range(num_rows):
        sampler.admit(slot, SamplingParams(seed=slot + 2**40, **PARAMS[slot % len(PARAMS)]))
    return sampler


class Case(NamedTuple):
    """Rows of k + 1 places each, and others' logits that drafts are drawn from."""

    logits: Tensor  # float32 [R, k + 1, V]
    others: Tensor  # float32 [R, k, V]
    slots: Tensor  # int32 [R]
    positions: Tensor  # int32 [R]
    needs: Needs


def make_case(num_rows: int, k: int, *, truncation: bool) -> Case:
    """Every other row's drafts are drawn from its own distribution; a few rows are not finite."""
    logits = torch.randn(num_rows, k + 1, VOCAB, generator=RANDOM) * 3
    others = logits[:, :k].clone()
    others[1::2] += torch.randn(others[1::2].shape, generator=RANDOM)
    logits[-1, 0], others[-1, 0] = torch.nan, torch.nan
    needs = Needs(random=True, truncation=truncation)
    return Case(logits, others, torch.arange(num_rows).int(), ints(2**20, num_rows), needs)


@pytest.mark.parametrize("max_listed", [64, MAX_LISTED])
@pytest.mark.parametrize("truncation", [False, True])
def test_what_drafts_are_drawn_from(truncation: bool, max_listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and distributions; also where a list does not hold what a row keeps."""
    monkeypatch.setattr("rose.kernels.sampling_kept.MAX_LISTED", max_listed)
    num_rows = 7
    case, found = make_case(num_rows, 1, truncation=truncation), []
    for ops, device in ((TorchOps(), torch.device("cpu")), (TritonOps(), DEVICE)):
        sampler = make_sampler(num_rows, ops, device)
        q = torch.empty(num_rows, 2, VOCAB, device=device)[:, 1]
        tokens = sampler.draw_drafts(
            *(x.to(device) for x in (case.others[:, 0].contiguous(), case.slots, case.positions, case.positions)),
            needs=case.needs, probabilities=q,
        )  # fmt: skip
        found.append((tokens.cpu(), q.cpu()))
    (expected, p), (tokens, q) = found
    assert torch.equal(tokens, expected)
    assert torch.equal(q, p)
    assert (q[1].max(), q[-1].max()) == (1, 1), "the only token of a greedy row, and of one that is not finite"


@pytest.mark.parametrize("truncation", [False, True])
def test_drawn(truncation: bool) -> None:
    """Rows whose drafts are drawn from the target's own distribution, from another, and greedy ones."""
    k, num_rows = 3, 7
    case = make_case(num_rows, k, truncation=truncation)
    counts = torch.tensor([3, 3, 2, 3, 3, 0, 1], dtype=torch.int32)
    spans = spans_of([k + 1] * num_rows)
    slots = case.slots[spans.rows]
    positions = case.positions[spans.rows] + spans.offsets.int()
    places = Places(slots, positions, positions, spans)
    reference = make_sampler(num_rows, TorchOps(), torch.device("cpu"))
    q = torch.empty(num_rows, k, VOCAB)
    drawn = [
        reference.draw_drafts(
            case.others[:, i].contiguous(), case.slots, case.positions + i, case.positions,
            needs=case.needs, probabilities=q[:, i],
        )
        for i in range(k)
    ]  # fmt: skip
    drafts = torch.stack(drawn, 1)
    flat = case.logits.flatten(0, 1)
    expected = verify(reference, flat.clone(), places, drafts, counts, q, needs=case.needs)
    sampler = make_sampler(num_rows, TritonOps(), DEVICE)
    each = kept(flat.to(DEVICE), sampler.state, slots.to(DEVICE), case.needs)
    at = kernels.DrawnAt(*(x.to(DEVICE) for x in (slots, positions, spans.cu_seqlens)))
    found = kernels.accept_drawn(each, sampler.state, at, *(x.to(DEVICE) for x in (drafts, counts, q)))
    assert torch.equal(found[1].cpu(), expected.num_new)
    assert torch.equal(found[0].cpu(), expected.tokens)
    assert (expected.num_new[:-1:2] == counts[:-1:2] + 1).all()  # p and q are one
    assert (expected.num_new < counts + 1).any()
    assert np.ptp(expected.tokens.numpy()) > TILE  # in either tile
