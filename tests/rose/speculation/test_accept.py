"""Acceptance against what it stands for: whatever is drafted, tokens have the target's distribution.

Where drafts are no draws themselves, they are the target's tokens draw for draw.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from ipc.types import SamplingParams
from rose.sampling.distribution import draw
from rose.sampling.params import SEED_HIGH, SEED_LOW
from rose.sampling.philox import STREAM_DRAFT, uniform_bits
from rose.sampling.sampler import Sampler
from rose.slots import Spans
from rose.speculation.accept import Accepted, Places, accept_draws, by_rows, verify
from tests.rose.sampling import drawing

VOCAB, EOS = 24, (1,)
NUM_ROWS = 6_000


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def spans_of(lengths: list[int]) -> Spans:
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))
    rows = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(len(rows)) - cu_seqlens[rows]
    return Spans(torch.from_numpy(cu_seqlens.astype(np.int32)), torch.from_numpy(rows), torch.from_numpy(offsets))


@pytest.mark.parametrize(
    ("drafts", "count", "draws", "tokens"),
    [
        ([5, 6, 7], 3, [5, 6, 7, 8], [5, 6, 7, 8]),
        ([5, 6, 7], 3, [5, 9, 7, 8], [5, 9]),
        ([5, 6, 7], 3, [4, 6, 7, 8], [4]),
        ([5, 6, 7], 2, [5, 6, 7, 8], [5, 6, 7]),  # its third is no draft
        ([5, 6, 7], 0, [5, 6, 7, 8], [5]),
    ],
)
def test_tokens_up_to_the_first_difference(drafts: list[int], count: int, draws: list[int], tokens: list[int]) -> None:
    """Also beside rows with other numbers of places, as on a CPU."""
    spans = spans_of([4, 1, count + 1])
    all_draws = int32([*draws, 3, *draws[: count + 1]])
    found = accept_draws(all_draws, spans, int32([drafts, [5, 6, 7], drafts]), int32([count, 0, count]))
    assert found.num_new.tolist() == [len(tokens), 1, len(tokens)]
    padded = [*tokens, 0, 0, 0][:4]
    assert found.tokens.tolist() == [padded, [3, 0, 0, 0], padded]


class Draws(NamedTuple):
    """Many rows of one sequence each, which differ in their seeds alone."""

    sampler: Sampler
    places: Places
    logits: Tensor  # float32 [k + 1, V]: of the target, at each place


def make_draws(params: SamplingParams, k: int, seed: int) -> Draws:
    """One slot a row: seeds make the difference."""
    sampler = Sampler(
        max_num_seqs=NUM_ROWS, vocab_size=VOCAB, max_logprobs=0, eos_token_ids=EOS, device=torch.device("cpu")
    )
    sampler.admit(0, params)
    for table in (sampler.state.table, sampler.state.bias_ids, sampler.state.bias_values, sampler.state.stop_ids):
        table[1:NUM_ROWS] = table[0]
    sampler.state.table[:NUM_ROWS, SEED_LOW] = torch.arange(NUM_ROWS).int()
    slots = torch.arange(NUM_ROWS).int()
    spans = spans_of([k + 1] * NUM_ROWS)
    places = Places(slots[spans.rows], (spans.offsets + 70).int(), (spans.offsets + 3).int(), spans)
    logits = torch.randn(k + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    return Draws(sampler, places, logits)


def run(draws: Draws, drafts: Tensor, probabilities: Tensor | None) -> Accepted:
    sampler, places, logits = draws
    counts = torch.full((NUM_ROWS,), drafts.shape[1], dtype=torch.int32)
    needs = sampler.needs([0])
    return verify(sampler, logits[places.spans.offsets], places, drafts, counts, probabilities, needs=needs)


def check_distribution(found: Accepted, draws: Draws) -> None:
    """The token at each place, of those rows that got so far, is distributed as the target says."""
    first = torch.zeros(1, dtype=torch.int32)
    for place, logits in enumerate(draws.logits):
        expected = drawing.probabilities(
            draws.sampler, logits[None], first, first + 3 + place, needs=draws.sampler.needs([0])
        )[0].double()  # fmt: skip
        got = found.tokens[found.num_new > place, place]
        counts = torch.bincount(got, minlength=VOCAB).double()
        possible = expected > 0
        assert counts[~possible].sum() == 0
        if possible.sum() > 1 and counts.sum() > 500:
            large = possible & (expected * counts.sum() >= 5)
            values = torch.cat([counts[large], counts[possible & ~large].sum()[None]])
            wanted = torch.cat([expected[large], expected[possible & ~large].sum()[None]])
            values, wanted = values[wanted > 0], wanted[wanted > 0] / wanted.sum()
            assert chisquare(values.numpy(), (wanted * counts.sum()).numpy()).pvalue > 1e-4, place


PARAMS = {
    "plain": SamplingParams(),
    "truncated": SamplingParams(temperature=1.4, top_k=9, top_p=0.85),
    "biased": SamplingParams(temperature=0.8, logit_bias={4: 2.0, 5: -100.0}, min_tokens=4, stop_token_ids=(6,)),
}


@pytest.mark.parametrize("name", PARAMS)
def test_only_possible_drafts(name: str) -> None:
    """Accepted as often as the target gives them, and the tokens are those of a generation without drafts."""
    draws = make_draws(PARAMS[name], 2, seed=1)
    best = draws.logits.argmax(1)[:2]
    drafts = best.int().repeat(NUM_ROWS, 1)
    found = run(draws, drafts, None)
    check_distribution(found, draws)
    alone = draws.sampler.draw(
        draws.logits[draws.places.spans.offsets], draws.places.slots, draws.places.positions, draws.places.num_output,
        needs=draws.sampler.needs([0]),
    )  # fmt: skip
    kept = torch.arange(3) < found.num_new[:, None]
    assert torch.equal(found.tokens[kept], by_rows(alone, draws.places.spans, 3)[kept])


@pytest.mark.parametrize("kind", ["near", "far", "same"])
@pytest.mark.parametrize("name", PARAMS)
def test_drawn_drafts(name: str, kind: str) -> None:
    """Drafts from the target's distribution itself are all accepted; from others, as often as both agree."""
    draws = make_draws(PARAMS[name], 2, seed=2)
    noise = (
        torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)) * {"near": 0.7, "far": 3.0, "same": 0.0}[kind]
    )
    first, needs = torch.zeros(2, dtype=torch.int32), draws.sampler.needs([0])
    weights = drawing.weights(
        draws.sampler, draws.logits[:2] + noise, first, first + 3 + torch.arange(2).int(), needs=needs
    )
    q = (weights.double() / weights.sum(1, keepdim=True)).float()
    seeds = draws.sampler.state.table[:NUM_ROWS]
    drafts = torch.stack(
        [
            draw(
                weights[place].expand(NUM_ROWS, -1),
                *uniform_bits(seeds[:, SEED_LOW], seeds[:, SEED_HIGH], 70 + 0 * seeds[:, 0] + place, STREAM_DRAFT),
                torch.zeros(NUM_ROWS, dtype=torch.int64),
            )
            for place in range(2)
        ],
        dim=1,
    ).int()
    found = run(draws, drafts, q[None].expand(NUM_ROWS, -1, -1))
    check_distribution(found, draws)
    p = drawing.probabilities(draws.sampler, draws.logits[:2], first, first + 3 + torch.arange(2).int(), needs=needs)
    agreement = float(torch.minimum(p, q)[0].sum())
    assert (found.num_new > 1).double().mean() == pytest.approx(agreement, abs=0.02)
    if kind == "same":
        assert (found.num_new == 3).all()


def test_greedy_rows_take_the_most_likely_token_alone() -> None:
    """Whatever the drafts were drawn from."""
    draws = make_draws(SamplingParams(temperature=0.0), 2, seed=3)
    best = draws.logits.argmax(1).int()
    q = torch.full((NUM_ROWS, 2, VOCAB), 1 / VOCAB)
    drafts = torch.randint(0, VOCAB, (NUM_ROWS, 2), generator=torch.Generator().manual_seed(1)).int()
    drafts[: NUM_ROWS // 2, 0] = best[0]
    found = run(draws, drafts, q)
    right = (drafts == best[:2]).int().cumprod(1).sum(1)
    assert torch.equal(found.num_new, (right + 1).int())
    kept = torch.arange(3) < found.num_new[:, None]
    assert torch.equal(found.tokens[kept], best.expand(NUM_ROWS, 3)[kept])
