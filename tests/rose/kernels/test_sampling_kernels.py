"""Sampling's kernels against its torch reference, bit for bit where they compute in integers."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ipc.types import SamplingParams
from rose.kernels import sampling_choose
from rose.kernels.sampling import TritonOps
from rose.kernels.sampling_math import EXACT, TILE, keys_of, scale_bits, uniform_bits, weight
from rose.sampling import distribution, philox
from rose.sampling.params import Needs
from rose.sampling.reference import TorchOps, ordered_keys
from rose.sampling.sampler import Sampler, SamplingOps
from tests.rose.sampling import drawing
from tests.rose.sampling.test_sampler import VARIANTS

# the interpreter says aloud what infinities do
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 2 * TILE + 1003  # three tiles, odd
EOS = (3, VOCAB - 1)


@triton.jit
def _math_kernel(x_ptr, keys_ptr, weights_ptr, maximum, inverse, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    tl.store(keys_ptr + at, keys_of(x, at), mask=at < count)
    tl.store(weights_ptr + at, weight(x, maximum, inverse), mask=at < count)


@triton.jit
def _random_kernel(low_ptr, high_ptr, position_ptr, n_ptr, out_ptr, stream):
    at = tl.program_id(0)
    seed_low, seed_high = tl.load(low_ptr + at), tl.load(high_ptr + at)
    high, low = uniform_bits(seed_low, seed_high, tl.load(position_ptr + at), stream)
    tl.store(out_ptr + at * 3, high)
    tl.store(out_ptr + at * 3 + 1, low)
    tl.store(out_ptr + at * 3 + 2, scale_bits(high, low, tl.load(n_ptr + at)))


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.3, 0.01, 1e-9])
def test_weights_and_keys_are_the_same_bits(temperature: float) -> None:
    x = normal(1, 4000, scale=6.0)
    x[0, :6] = torch.tensor([0.0, -0.0, torch.nan, -torch.inf, 1e-40, -1e30])
    inverse = torch.tensor([1 / temperature], device=DEVICE)
    keys, weights = (torch.empty(1, 4000, dtype=torch.int64, device=DEVICE) for _ in range(2))
    maximum = float(distribution.without_nan(x).max())
    _math_kernel[(1,)](x, keys, weights, maximum, float(inverse), 4000, BLOCK=4096, **EXACT)
    assert torch.equal(weights, distribution.weights(x, torch.tensor([maximum], device=DEVICE), inverse))
    assert torch.equal(keys, ordered_keys(distribution.without_nan(x)))


def test_random_numbers_are_the_same_bits() -> None:
    count = 64
    generator = torch.Generator().manual_seed(0)
    low, high = (torch.randint(-(2**31), 2**31, (count,), generator=generator).int().to(DEVICE) for _ in range(2))
    positions = torch.randint(0, 2**31, (count,), generator=generator).int().to(DEVICE)
    n = torch.randint(0, 2**58, (count,), generator=generator).to(DEVICE)
    found = torch.empty(count, 3, dtype=torch.int64, device=DEVICE)
    _random_kernel[(count,)](low, high, positions, n, found, philox.STREAM_ACCEPT)
    bits = philox.uniform_bits(low, high, positions, philox.STREAM_ACCEPT)
    assert torch.equal(found, torch.stack([*bits, philox.scale_bits(*bits, n)], dim=1))


def samplers(params: list[SamplingParams]) -> list[Sampler]:
    """One by kernels, one by torch, which have seen the same tokens."""
    made = []
    ops: SamplingOps
    for ops in (TritonOps(), TorchOps()):
        sampler = Sampler(
            max_num_seqs=len(params), vocab_size=VOCAB, max_logprobs=5, eos_token_ids=EOS, device=DEVICE, ops=ops
        )
        for slot, one in enumerate(params):
            sampler.admit(slot, one)
        slots = [slot for slot in range(len(params)) for _ in range(6)]
        seen = [5, 5, 6, VOCAB - 1, 7, 7] * len(params)
        sampler.observe(int32(slots), int32(seen), int32([0, 0, 0, 1, 1, 1] * len(params)))
        made.append(sampler)
    return made


def draw_both(params: list[SamplingParams], logits: Tensor, bitmask: Tensor | None = None) -> list[drawing.Sampled]:
    rows = int32(range(len(params)))
    found = []
    for sampler in samplers(params):
        for _ in range(2):  # the second time over what the first has counted
            needs = sampler.needs(rows.tolist())
            drawn = drawing.sample(
                sampler, logits.clone(), rows, 100 + rows, 0 * rows + 3, needs=needs, bitmask=bitmask
            )
            found.append(drawn)
        if sampler.state.counts is not None:
            found.append(drawing.Sampled(sampler.state.counts))
    return found


def check(found: list[drawing.Sampled]) -> None:
    half = len(found) // 2
    for kernel, reference in zip(found[:half], found[half:], strict=True):
        assert torch.equal(kernel.tokens, reference.tokens)
        assert (kernel.top_ids is None) == (reference.top_ids is None)
        if kernel.top_ids is not None and kernel.logprobs is not None and kernel.top_logprobs is not None:
            assert reference.top_ids is not None
            assert torch.equal(kernel.top_ids, reference.top_ids)
            torch.testing.assert_close(kernel.logprobs, reference.logprobs, atol=2e-6, rtol=1e-6)
            torch.testing.assert_close(kernel.top_logprobs, reference.top_logprobs, atol=2e-6, rtol=1e-6)


ALL = [
    "plain",
    "greedy",
    "top_p",
    "top_p 0",
    "top_k",
    "top_k 1",
    "min_p",
    "all three",
    "all penalties",
    "bias",
    "min_tokens",
]


@pytest.mark.parametrize(("scale", "names"), [(3.0, ALL), (0.3, ["top_p", "all three"])])
def test_parameters_in_one_step(scale: float, names: list[str]) -> None:
    """Peaked distributions and flat ones."""
    params = [SamplingParams(seed=slot, logprobs=5, **VARIANTS[name]) for slot, name in enumerate(names)]
    check(draw_both(params, normal(len(params), VOCAB, scale=scale)))


@pytest.mark.parametrize("name", ["greedy", "plain", "greedy penalties", "bias", "min_tokens"])
def test_steps_that_need_little(name: str) -> None:
    params = [SamplingParams(seed=slot, **VARIANTS[name]) for slot in range(3)]
    check(draw_both(params, normal(3, VOCAB, seed=1)))


def test_a_mask_and_padding_rows() -> None:
    params = [SamplingParams(seed=slot, **VARIANTS[name]) for slot, name in enumerate(["plain", "greedy", "top_p"])]
    bitmask = torch.randint(-(2**31), 2**31, (5, (VOCAB + 31) // 32), generator=torch.Generator().manual_seed(3))
    logits = normal(5, VOCAB)
    rows = int32([0, -1, 1, 2, 3])
    found = []
    for sampler in samplers(params):
        needs, mask = sampler.needs([0, 1, 2]), bitmask.int().to(DEVICE)
        drawn = drawing.sample(sampler, logits.clone(), rows, 0 * rows, 0 * rows, needs=needs, bitmask=mask)
        found.append(drawn.tokens)
    assert torch.equal(*found)
    for row, token in enumerate(found[0].tolist()):
        assert int(bitmask[row, token // 32]) >> (token % 32) & 1


def test_penalties_of_drafts_before() -> None:
    """Tokens that are not counted yet, also one that was seen, one twice, and none."""
    names = ["all penalties", "greedy penalties", "plain", "all penalties"]
    params = [SamplingParams(seed=slot, **VARIANTS[name]) for slot, name in enumerate(names)]
    logits, rows = normal(4, VOCAB), int32(range(4))
    before = int32([[7, VOCAB - 1, 3000], [3000, 3000, -1], [3000, 1, 2], [-1, -1, -1]])
    needs = Needs(penalties=True)
    adjusted = []
    state = samplers(params)[0].state
    for ops, earlier in ((TritonOps(), before), (TorchOps(), before), (TorchOps(), None)):
        adjusted.append(logits.clone())
        ops.adjust(adjusted[-1], state, rows, 0 * rows, None, needs, earlier)
    by_kernel, by_torch, without = adjusted
    assert torch.equal(by_kernel, by_torch)
    changed = [(row != other).nonzero()[:, 0].tolist() for row, other in zip(by_torch, without, strict=True)]
    assert changed == [[7, 3000, VOCAB - 1], [3000], [], []]  # the third has no penalties


def test_ties() -> None:
    """At every threshold; also the largest logit itself, in several tiles."""
    logits = torch.full((4, VOCAB), -2.0, device=DEVICE)
    logits[:, [17, TILE - 1, TILE, 2 * TILE + 5, VOCAB - 1]] = 5.0
    variants: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 1.0}]
    found = draw_both([SamplingParams(seed=7, logprobs=5, **variant) for variant in variants], logits)
    check(found)
    assert int(found[0].tokens[0]) == 17
    assert found[0].top_ids is not None
    assert found[0].top_ids[0].tolist() == [17, TILE - 1, TILE, 2 * TILE + 5, VOCAB - 1]


def test_lists_too_long_are_walked_in_the_row() -> None:
    """With room for 100 tokens, a few or a few thousand of which are kept."""
    variants: list[dict[str, Any]] = [{"top_k": 50}, {"top_k": 3000, "top_p": 0.9}, {"top_p": 0.99}, {"min_p": 0.5}]
    params = [SamplingParams(seed=slot, **variant) for slot, variant in enumerate(variants)]
    by_kernel, by_torch = samplers(params)
    logits, rows = normal(4, VOCAB, scale=0.5), int32(range(4))
    needs = Needs(random=True, truncation=True)
    tokens = sampling_choose.choose(logits, by_kernel.state, rows, rows, needs, max_listed=100)
    assert torch.equal(tokens, drawing.sample(by_torch, logits, rows, rows, rows, needs=needs).tokens)


def test_rows_that_are_not_finite() -> None:
    params = [SamplingParams(seed=1, logprobs=2, **VARIANTS["all three"]) for _ in range(6)]
    logits = normal(1, VOCAB).repeat(6, 1)
    logits[1], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, ::2] = torch.nan
    found = draw_both(params, logits)
    for drawn in found:
        assert ((drawn.tokens >= 0) & (drawn.tokens < VOCAB)).all()
    assert torch.equal(found[0].tokens, found[2].tokens)
