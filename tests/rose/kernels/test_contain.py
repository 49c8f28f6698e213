"""Values that are not finite, kept from kernels that read past a sequence's end: here one in numbers."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rose.kernels.contain import REACH, contain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, DIM = 2, 32


def views(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in one packed buffer, as a projection leaves them."""
    torch.manual_seed(0)
    qkv = torch.randn(num_tokens, 3 * HEADS * DIM).to(dtype).to(DEVICE)
    q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in qkv.chunk(3, dim=-1))
    return q, k, v


def spreading_attention(q: Tensor, k: Tensor, v: Tensor, offsets: list[int], tile: int) -> Tensor:
    """As a kernel with whole tiles of keys: those past an end are masked, and weighed with 0."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    out = torch.zeros_like(q)
    for start, end in pairwise(offsets):
        stop = min(start + -(-(end - start) // tile) * tile, q.shape[1])
        scores = q[:, start:end] @ k[:, start:stop].transpose(1, 2)
        scores[:, :, end - start :] = -math.inf
        out[:, start:end] = scores.softmax(-1) @ v[:, start:stop]
    return out.transpose(0, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bad_value_reaches_its_own_sequence_alone(dtype: torch.dtype, value: float) -> None:
    offsets = [0, 9, 9, 40, 41, 60]
    q, k, v = views(70, dtype)  # ten of padding
    expected = spreading_attention(q, k, v, offsets, 64)[:60]
    v[20, 1, 3] = value  # of the third sequence
    v[62, 0, 0] = value  # old tokens
    spoilt = spreading_attention(q, k, v, offsets, 64)[:60]
    assert not spoilt[:9, 1, 3].isfinite().any()  # without help the first fails too
    assert not spoilt[41:, 0, 0].isfinite().any()  # and the last
    contain(k, v, torch.tensor(offsets, dtype=torch.int32, device=DEVICE))
    got = spreading_attention(q, k, v, offsets, 64)[:60]
    others = [*range(9), *range(40, 60)]
    torch.testing.assert_close(got[others], expected[others], rtol=0, atol=0)
    assert not got[9:40].isfinite().any()


def test_what_is_finite_stays_as_it_is() -> None:
    _, k, v = views(600, torch.bfloat16)
    v[5] = torch.finfo(torch.bfloat16).max
    k[7] = math.inf  # keys are masked by choice: they need no help
    before = k.clone(), v.clone()
    contain(k, v, torch.tensor([0, 300, 590], dtype=torch.int32, device=DEVICE))
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])


def test_every_row_within_reach_of_an_end_is_looked_at() -> None:
    offsets = [0, 3, 3 + 2 * REACH]
    _, k, v = views(offsets[-1] + 20, torch.float16)
    v[:] = math.nan
    contain(k, v, torch.tensor(offsets, dtype=torch.int32, device=DEVICE))
    reached = [*range(3 + REACH), *range(offsets[-1], len(v))]
    assert (v[reached] == 0).all()
    assert k[reached].isnan().all()
    assert v[3 + REACH : offsets[-1]].isnan().all()  # no other sequence ends near it
