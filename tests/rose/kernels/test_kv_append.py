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
