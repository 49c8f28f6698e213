"""The generator's known answers, its uniform numbers, and exact scaling."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from rose.sampling.philox import STREAM_ACCEPT, STREAM_TOKEN, philox, scale_bits, uniform_bits


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [  # from the authors' own table of known answers
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], want: str) -> None:
    words = philox(tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key))  # type: ignore[arg-type]
    assert " ".join(f"{int(word):08x}" for word in words) == want


def uniforms(seed: int, stream: int, count: int = 5000) -> np.ndarray:
    low, high = (torch.full((count,), word, dtype=torch.int32) for word in (seed, -seed))
    bits = uniform_bits(low, high, torch.arange(count, dtype=torch.int32), stream)
    return (bits[0].double() * 2.0**-31 + bits[1].double() * 2.0**-62).numpy()


def test_numbers_are_uniform_and_streams_independent() -> None:
    numbers = [uniforms(seed, stream) for seed in (0, 1, -5) for stream in (STREAM_TOKEN, STREAM_ACCEPT)]
    for u in numbers:
        assert kstest(u, "uniform").pvalue > 0.001
    assert np.abs(np.corrcoef(numbers) - np.eye(len(numbers))).max() < 0.06


def test_scaling_is_exact() -> None:
    random = np.random.default_rng(0)
    n = [int(v) for v in random.integers(0, 2**58, 500)] + [0, 1, 2**31, 2**58]
    high, low = ([int(v) for v in random.integers(0, 2**31, len(n))] for _ in range(2))
    high[:2] = low[:2] = [2**31 - 1] * 2
    found = scale_bits(torch.tensor(high), torch.tensor(low), torch.tensor(n))
    assert found.tolist() == [(a * 2**31 + b) * c >> 62 for a, b, c in zip(high, low, n, strict=True)]
