"""The sampler against a plain one: every parameter, the draws' distribution, seeds in any batch, rows gone wrong."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ipc.types import SamplingParams
from rose.sampling.params import MAX_BIASES, MAX_STOPS, Needs, UnusableParams
from rose.sampling.sampler import Sampler
from tests.rose.sampling import drawing
from tests.rose.sampling.plain import plain_logits, plain_probabilities, plain_softmax

VOCAB = 301  # neither even nor a multiple of 32
EOS = (3, 4)
CPU = torch.device("cpu")
PROMPT = [5, 5, 6, 300, 7]
OUTPUT = [7, 8, 8, 8, 299]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 7.5},
    "almost greedy": {"temperature": 1e-6},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.8},
    "top_p of hot": {"top_p": 0.5, "temperature": 2.0},
    "top_p 0": {"top_p": 0.0},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k beyond": {"top_k": 5000},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "all three": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.5},
    "all penalties": {"presence_penalty": -1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "top_p": 0.9},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0},
    "bias": {"logit_bias": {0: 5.0, 300: -100.0, 8: 100.0, 4: 2.5}},
    "mild bias": {"logit_bias": {0: 3.0, 300: -100.0, 8: 1.5}},
    "bias and penalties": {"logit_bias": {7: 3.0, 5: -2.0}, "repetition_penalty": 1.5, "presence_penalty": 0.4},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (9, 10)},
    "min_tokens reached": {"min_tokens": 5, "stop_token_ids": (9, 10)},
    "min_tokens over bias": {"min_tokens": 6, "stop_token_ids": (9,), "logit_bias": {9: 100.0, 3: 50.0}},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operators: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_sampler(max_num_seqs: int = 64) -> Sampler:
    return Sampler(max_num_seqs=max_num_seqs, vocab_size=VOCAB, max_logprobs=20, eos_token_ids=EOS, device=CPU)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def observe(sampler: Sampler, slots: list[int], prompt: list[int] = PROMPT, output: list[int] = OUTPUT) -> None:
    tokens = [(slot, token, kind) for slot in slots for kind, ids in ((0, prompt), (1, output)) for token in ids]
    sampler.observe(*(int32(column) for column in zip(*tokens, strict=True)))


def random_logits(rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def sample(sampler: Sampler, logits: torch.Tensor, slots: list[int], position: int = 11) -> drawing.Sampled:
    rows = int32([position] * len(slots)), int32([len(OUTPUT)] * len(slots))
    return drawing.sample(sampler, logits.clone(), int32(slots), *rows, needs=sampler.needs(slots))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter(name: str) -> None:
    params = SamplingParams(seed=1, **VARIANTS[name])
    sampler = make_sampler(3)
    sampler.admit(1, params)
    observe(sampler, [1])
    logits = random_logits(1)
    num_output = int32([len(OUTPUT)])
    found = drawing.probabilities(sampler, logits, int32([1]), num_output, needs=Needs.of(params))[0].double().numpy()
    adjusted = plain_logits(logits[0].double().numpy(), params, PROMPT, OUTPUT, EOS)
    want = plain_probabilities(adjusted, params)
    assert ((found > 0) == (want > 1e-12)).all()
    np.testing.assert_allclose(found, want, rtol=3e-6, atol=1e-9)


def test_all_parameters_in_one_batch() -> None:
    """Each row by its own parameters, whatever its neighbours need; padding rows among them."""
    sampler = make_sampler()
    for slot, variant in enumerate(VARIANTS.values()):
        sampler.admit(slot, SamplingParams(seed=slot, **variant))
    slots = list(range(len(VARIANTS)))
    observe(sampler, slots)
    logits = random_logits(len(VARIANTS) + 2)
    rows = [*slots[:5], -1, *slots[5:], 64]
    needs = sampler.needs(slots)
    together = drawing.probabilities(sampler, logits, int32(rows), int32([5] * len(rows)), needs=needs)
    for row, slot in enumerate(rows):
        if slot in slots:
            alone = drawing.probabilities(
                sampler,
                logits[row : row + 1],
                int32([slot]),
                int32([5]),
                needs=Needs.of(SamplingParams(**[*VARIANTS.values()][slot])),
            )
            assert torch.equal(alone[0], together[row])
        else:
            assert together[row].argmax() == logits[row].argmax()
            assert together[row].max() == 1


@pytest.mark.parametrize(
    "name", ["plain", "cold", "top_p", "top_k", "min_p", "all three", "all penalties", "mild bias"]
)
def test_draws_have_the_distribution(name: str) -> None:
    """Positions are independent draws: chi-square over 20,000 of them against the exact distribution."""
    params = SamplingParams(seed=77, **VARIANTS[name])
    sampler = make_sampler(1)
    sampler.admit(0, params)
    observe(sampler, [0])
    logits = random_logits(1, seed=3)
    want = plain_probabilities(plain_logits(logits[0].double().numpy(), params, PROMPT, OUTPUT, EOS), params)
    num_draws, chunk = 20_000, 500
    seen = np.zeros(VOCAB, np.int64)
    counts = None if sampler.state.counts is None else sampler.state.counts.clone()
    for begin in range(0, num_draws, chunk):
        positions = torch.arange(begin, begin + chunk, dtype=torch.int32)
        drawn = drawing.sample(
            sampler, logits.repeat(chunk, 1), int32([0] * chunk), positions, int32([5] * chunk), needs=Needs.of(params)
        )
        seen += np.bincount(drawn.tokens.numpy(), minlength=VOCAB)
        if counts is not None:  # each draw is the first after OUTPUT
            assert sampler.state.counts is not None
            sampler.state.counts.copy_(counts)
    assert seen[want == 0].sum() == 0
    often = want * num_draws >= 5
    observed = [*seen[often], seen[~often].sum()]
    expected = [*(want[often] * num_draws), want[~often].sum() * num_draws]
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
        expected = np.array(expected) * (sum(observed) / sum(expected))
    assert chisquare(observed, expected).pvalue > 0.001


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch() -> None:
    names = ["plain", "hot", "top_p", "top_k", "all three", "min_p", "greedy", "all penalties", "bias", "min_tokens"]
    logits = random_logits(len(names), seed=5, scale=1.0)
    slots = list(range(len(names)))

    def fresh() -> Sampler:
        sampler = make_sampler()
        for slot, name in enumerate(names):
            sampler.admit(slot, SamplingParams(seed=100 + slot, logprobs=slot, **VARIANTS[name]))
        observe(sampler, slots)
        return sampler

    alone = [sample(fresh(), logits[slot : slot + 1], [slot]) for slot in slots]
    random = np.random.default_rng(1)
    for size in (2, 3, 7, 10):
        rows = [int(slot) for slot in random.permutation(slots)[:size]]
        together = sample(fresh(), logits[rows], rows)
        for index, slot in enumerate(rows):
            for one, all_rows in zip(alone[slot], together, strict=True):
                assert torch.equal(one[0], all_rows[index])


def test_seeds_and_positions_make_different_draws() -> None:
    sampler = make_sampler()
    for slot in range(64):
        sampler.admit(slot, SamplingParams(seed=slot - 32))
    logits = torch.zeros(64, VOCAB)
    first, again = (sample(sampler, logits, list(range(64))).tokens for _ in range(2))
    later = sample(sampler, logits, list(range(64)), position=12).tokens
    assert torch.equal(first, again)
    assert len(set(first.tolist())) > 40
    assert (first != later).sum() > 50


def test_greedy_ties_go_to_the_lowest_id() -> None:
    sampler = make_sampler(2)
    sampler.admit(0, SamplingParams(temperature=0))
    sampler.admit(1, SamplingParams(temperature=0, logprobs=3))
    logits = torch.full((2, VOCAB), -1.0)
    logits[:, [17, 200, 300]] = 4.0
    drawn = sample(sampler, logits, [0, 1])
    assert drawn.tokens.tolist() == [17, 17]
    assert drawn.top_ids is not None
    assert drawn.top_ids[1, :5].tolist() == [17, 200, 300, 0, 1]


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.9}])
def test_what_ties_with_the_last_kept_is_kept(params: dict[str, Any]) -> None:
    sampler = make_sampler(1)
    sampler.admit(0, SamplingParams(**params))
    logits = torch.zeros(1, VOCAB)
    logits[0, [17, 200, 300]] = 9.0
    p = drawing.probabilities(sampler, logits, int32([0]), int32([0]), needs=Needs(random=True, truncation=True))
    assert p[0].nonzero()[:, 0].tolist() == [17, 200, 300]


def test_logprobs_are_of_the_raw_distribution() -> None:
    sampler = make_sampler(4)
    variants = [{}, {"temperature": 0.0}, VARIANTS["all penalties"], VARIANTS["bias"]]
    for slot, variant in enumerate(variants):
        sampler.admit(slot, SamplingParams(seed=slot, logprobs=20, **variant))
    observe(sampler, [0, 1, 2, 3])
    logits = random_logits(4, scale=5.0)
    drawn = sample(sampler, logits, [0, 1, 2, 3])
    want = np.log([plain_softmax(row) for row in logits.double().numpy()])
    assert drawn.logprobs is not None
    assert drawn.top_ids is not None
    assert drawn.top_logprobs is not None
    np.testing.assert_allclose(drawn.logprobs, want[range(4), drawn.tokens], atol=2e-6)
    np.testing.assert_array_equal(drawn.top_ids, np.argsort(-want, kind="stable")[:, :20])
    np.testing.assert_allclose(drawn.top_logprobs, -np.sort(-want)[:, :20], atol=2e-6)


def test_prompt_logprobs() -> None:
    logits = random_logits(3, scale=30.0)  # probabilities down to e^-100
    values, top_ids, top_values = make_sampler(1).logprobs(logits, int32([0, 300, 7]))
    shifted = logits.double().numpy() - logits.double().numpy().max(1, keepdims=True)
    want = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    np.testing.assert_allclose(values, want[range(3), [0, 300, 7]], rtol=1e-6, atol=2e-6)
    np.testing.assert_array_equal(top_ids, np.argsort(-want, kind="stable")[:, :20])
    np.testing.assert_allclose(top_values, -np.sort(-want)[:, :20], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_that_are_not_finite_disturb_nobody(name: str) -> None:
    sampler = make_sampler(8)
    for slot in range(8):
        sampler.admit(slot, SamplingParams(seed=9, logprobs=2, **VARIANTS[name]))
    observe(sampler, list(range(8)))
    good = random_logits(1)
    logits = good.repeat(8, 1)
    logits[1], logits[3], logits[5] = torch.nan, torch.inf, -torch.inf
    logits[6, ::2] = torch.nan
    logits[7, 100] = torch.inf
    drawn = sample(sampler, logits, list(range(8)))
    assert ((drawn.tokens >= 0) & (drawn.tokens < VOCAB)).all()
    want = sample_alone(name, good)
    assert drawn.tokens[[0, 2, 4]].tolist() == [want] * 3


def sample_alone(name: str, logits: torch.Tensor) -> int:
    sampler = make_sampler(1)
    sampler.admit(0, SamplingParams(seed=9, logprobs=2, **VARIANTS[name]))
    observe(sampler, [0])
    return int(sample(sampler, logits, [0]).tokens[0])


def test_sampled_tokens_are_counted() -> None:
    """Greedy with a frequency penalty over equal steps: the count of each token decides the next."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    sampler = make_sampler(2)
    sampler.admit(1, params)
    logits = random_logits(1)
    output: list[int] = []
    for _ in range(30):
        token = int(sample(sampler, logits, [1]).tokens[0])
        assert token == np.argmax(plain_logits(logits[0].double().numpy(), params, [], output, EOS))
        output.append(token)
    assert max(output.count(token) for token in output) > 1
    sampler.admit(1, params)  # a new sequence has put out nothing
    assert int(sample(sampler, logits, [1]).tokens[0]) == output[0]


def test_slots_without_penalties_keep_no_counts() -> None:
    sampler = make_sampler(4)
    sampler.admit(0, SamplingParams())
    observe(sampler, [0])
    assert sampler.state.counts is None
    sampler.admit(1, SamplingParams(presence_penalty=0.1))
    observe(sampler, [0, 1, -1])
    assert sampler.state.counts is not None
    assert sampler.state.counts.any(1).tolist() == [False, True, False, False, False]
    assert sampler.state.counts.nbytes == sampler.state.counts_bytes == 5 * 302 * 2


@pytest.mark.parametrize("max_allowed", [1, 40])
def test_only_allowed_tokens_are_drawn(max_allowed: int) -> None:
    """A grammar's mask; also over min_tokens, where it allows nothing but the end."""
    sampler = make_sampler(6)
    for slot, name in enumerate(("plain", "greedy", "top_p", "bias", "all penalties", "min_tokens")):
        sampler.admit(slot, SamplingParams(seed=slot, **VARIANTS[name]))
    allowed = list(EOS) if max_allowed == 1 else list(range(0, VOCAB, VOCAB // max_allowed))
    mask = np.zeros((6, 320), np.uint8)
    mask[:, allowed] = 1
    mask[4] = 1  # a row without a grammar
    bitmask = torch.from_numpy(np.packbits(mask, axis=1, bitorder="little").view(np.int32))
    seen = set()
    for position in range(100):
        drawn = drawing.sample(
            sampler, random_logits(6, seed=position), int32(range(6)), int32([position] * 6), int32([0] * 6),
            needs=sampler.needs(list(range(6))), bitmask=bitmask,
        )  # fmt: skip
        assert {int(token) for token in drawn.tokens[[0, 1, 2, 3, 5]]} <= set(allowed)
        seen.add(int(drawn.tokens[4]))
    assert len(seen) > 20


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias names token 301"),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}, "names token"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(MAX_STOPS + 1))}, "min_tokens with 129 tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused(params: dict[str, Any], says: str) -> None:
    sampler = make_sampler(1)
    with pytest.raises(UnusableParams, match=says):
        sampler.admit(0, SamplingParams(**params))
    assert sampler.needs([0]) == Needs()
