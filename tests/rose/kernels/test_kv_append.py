"""Keys and values land where they are sent, and nowhere else."""

import pytest
import torch

from rose.kernels.kv_append import kv_append

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 32), (2, 64)])
def test_kv_append(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_blocks, block_size, num_tokens = 4, 4, 5
    qkv = torch.randn(num_tokens, (5 + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
    k, v = (x.unflatten(-1, (-1, head_dim)) for x in qkv[:, 5 * head_dim :].chunk(2, dim=-1))
    caches = [torch.randn(num_blocks, block_size, num_kv_heads, head_dim, device=DEVICE).to(dtype) for _ in range(2)]
    places = [7, 8, 0, 15, 3]
    expected = [cache.clone() for cache in caches]
    for token, place in enumerate(places):
        for cache, new in zip(expected, (k, v), strict=True):
            cache[place // block_size, place % block_size] = new[token]
    kv_append(k, v, *caches, torch.tensor(places, dtype=torch.int32, device=DEVICE))
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_goes_to_the_dummy_block_is_finite(dtype: torch.dtype) -> None:
    """Elsewhere a row keeps what it computed."""
    caches = [torch.zeros(3, 4, 1, 16, dtype=dtype, device=DEVICE) for _ in range(2)]
    bad = torch.full((2, 1, 16), float("nan"), device=DEVICE).to(dtype)
    bad[:, :, 5], bad[:, :, 6], bad[:, :, 7] = float("inf"), float("-inf"), 3.0
    kv_append(bad, -bad, *caches, torch.tensor([7, 8], dtype=torch.int32, device=DEVICE))
    for cache, sign in zip(caches, (1, -1), strict=True):
        assert cache[1, 3].isnan().sum() == 13
        assert cache[2, 0, 0].tolist() == [sign * 3.0 if column == 7 else 0.0 for column in range(16)]
