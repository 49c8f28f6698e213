"""Every small kernel against torch, in Triton's interpreter where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rose.attention.paged import Append
from rose.kernels.activation import gelu, silu_mul
from rose.kernels.embedding import embed, embed_layer_norm, embed_part, embed_rms_norm
from rose.kernels.kv_append import kv_append
from rose.kernels.norm import add_layer_norm, add_rms_norm
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.kernels.split_product import num_parts, split_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def rotation(head_dim: int, num_positions: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, head_dim / 2]."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    angles = torch.outer(torch.arange(num_positions, device=DEVICE).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] by cos, sin [T, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [384, 40])
def test_add_rms_norm(hidden_size: int, dtype: torch.dtype) -> None:
    x, residual = random(5, hidden_size, dtype=dtype), random(5, hidden_size, dtype=dtype)
    weight, bias = random(hidden_size, dtype=dtype), random(hidden_size, dtype=dtype)
    total = x.float() + residual.float() + bias.float()
    normed = add_rms_norm(x, residual, weight, 1e-6, bias=bias)
    close(residual, total, dtype)
    close(normed, F.rms_norm(total, (hidden_size,), weight.float(), 1e-6), dtype)
    close(add_rms_norm(x, None, weight, 1e-6), F.rms_norm(x.float(), (hidden_size,), weight.float(), 1e-6), dtype)


def test_add_rms_norm_in_place_and_strided() -> None:
    wide, weight = random(4, 96), random(64)
    expected = F.rms_norm(wide[:, :64], (64,), weight, 1e-6)
    close(add_rms_norm(wide[:, :64], None, weight, 1e-6, out=random(4, 64)), expected, torch.float32)
    x = wide[:, :64].contiguous()
    assert add_rms_norm(x, None, weight, 1e-6, out=x) is x
    close(x, expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_product_added_by_the_norm(dtype: torch.dtype) -> None:
    x, weight = random(6, 96, dtype=dtype), random(40, 96, dtype=dtype, scale=0.1)
    residual, norm_weight = random(6, 40, dtype=dtype), random(40, dtype=dtype)
    total = residual.float() + x.float() @ weight.float().T
    parts = split_product(x, weight, 4)
    assert parts.shape == (4, 6, 40)
    normed = add_rms_norm(parts, residual, norm_weight, 1e-6)
    close(residual, total, dtype)
    close(normed, F.rms_norm(total, (40,), norm_weight.float(), 1e-6), dtype)


def test_how_a_product_is_split() -> None:
    assert [num_parts(rows, 1024, 3072) for rows in (1, 64, 128, 256, 512, 4096)] == [8, 8, 4, 2, 1, 1]
    assert num_parts(128, 1024, 2048) == 4
    assert num_parts(128, 6144, 1024) == 1, "wide enough as it is"
    assert num_parts(8, 1024, 384) == 1, "too shallow to be worth it"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [384, 40])
def test_add_layer_norm(hidden_size: int, dtype: torch.dtype) -> None:
    x, residual = random(5, hidden_size, dtype=dtype), random(5, hidden_size, dtype=dtype)
    weight, bias, x_bias = (random(hidden_size, dtype=dtype) for _ in range(3))
    parameters = ((hidden_size,), weight.float(), bias.float(), 1e-12)
    total = x.float() + residual.float()
    close(add_layer_norm(x, residual, weight, bias, 1e-12), F.layer_norm(total, *parameters), dtype)
    expected = F.layer_norm(total + x_bias.float(), *parameters)
    close(add_layer_norm(x, residual, weight, bias, 1e-12, x_bias=x_bias, out=residual), expected, dtype)
    close(residual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * 1100, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    close(silu_mul(gate_up), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(dtype: torch.dtype) -> None:
    x, bias = random(3, 1100, dtype=dtype), random(1100, dtype=dtype)
    close(gelu(x), F.gelu(x.float()), dtype)
    expected = F.gelu(x.float() + bias.float())
    close(gelu(x, bias, out=x), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("norm", [True, False])
def test_qk_norm_rope(norm: bool, head_dim: int, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, num_tokens = 6, 3, 4  # 9 heads: the second program is not full
    cos, sin = rotation(head_dim, 16, 10_000.0)
    positions = torch.tensor([0, 1, 0, 15], dtype=torch.int32, device=DEVICE)
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    weights = (random(head_dim, dtype=dtype), random(head_dim, dtype=dtype)) if norm else (None, None)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q, k, v = qkv.clone().split(sizes, dim=-1)
    qk_norm_rope(
        qkv, *weights, positions, cos, sin,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
    )  # fmt: skip
    parts = qkv.split(sizes, dim=-1)
    for actual, raw, weight in zip(parts, (q, k), weights, strict=False):
        heads = raw.float().unflatten(-1, (-1, head_dim))
        if weight is not None:
            heads = F.rms_norm(heads, (head_dim,), weight.float(), 1e-6)
        close(actual, rotate(heads, cos[positions.long()][:, None], sin[positions.long()][:, None]).flatten(1), dtype)
    assert torch.equal(parts[2], v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(6, 3), (8, 8), (2, 1)])
@pytest.mark.parametrize("norm", [True, False])
def test_qk_norm_rope_appends(norm: bool, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """To the bit what the two kernels do one after the other, also in the dummy block, where NaN becomes zero."""
    num_heads, num_kv_heads = heads
    head_dim, num_tokens, width = 32, 5, (num_heads + 2 * num_kv_heads) * 32
    cos, sin = rotation(head_dim, 16, 10_000.0)
    positions = torch.tensor([0, 1, 0, 15, 3], dtype=torch.int32, device=DEVICE)
    packed = random(num_tokens, width + 8, dtype=dtype)
    packed[2:4, num_heads * head_dim : width : 3] = float("nan")
    packed[3, width - 7] = float("-inf")
    weights = (random(head_dim, dtype=dtype), random(head_dim, dtype=dtype)) if norm else (None, None)
    slot_mapping = torch.tensor([3, 11, 6, 13, 0], dtype=torch.int32, device=DEVICE)  # 12 on: the dummy block
    results = []
    for fused in (True, False):
        qkv = packed.clone()[:, :width]
        caches = [torch.full((4, 4, num_kv_heads, head_dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
        qk_norm_rope(
            qkv, *weights, positions, cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            append=Append(*caches, slot_mapping) if fused else None,
        )  # fmt: skip
        if not fused:
            k, v = qkv.unflatten(-1, (-1, head_dim))[:, num_heads:].chunk(2, dim=1)
            kv_append(k, v, *caches, slot_mapping)
        results.append((qkv, *caches))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, atol=0, rtol=0, equal_nan=True)
    k_cache, v_cache = results[0][1:]
    assert k_cache[1, 2].isnan().any()
    assert v_cache[1, 2].isnan().any()
    assert k_cache[3].isfinite().all()
    assert v_cache[3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype) -> None:
    word, weight = random(11, 40, dtype=dtype), random(40, dtype=dtype)
    ids = torch.tensor([3, 10, 0, 2**31 - 1, -5], dtype=torch.int32, device=DEVICE)
    rows = word[ids.long().clamp(0, 10)]
    assert torch.equal(embed(ids, word), rows)
    x, normed = embed_rms_norm(ids, word, weight, 1e-6)
    assert torch.equal(x, rows)
    close(normed, F.rms_norm(rows.float(), (40,), weight.float(), 1e-6), dtype)


def test_embed_part() -> None:
    """Parts of two ranks, of which the last has a row of its own less, add up to the whole."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    word = torch.randn(99, 96, device=device)
    ids = torch.tensor([0, 49, 50, 98, 7], dtype=torch.int32, device=device)
    parts = (word[:50], torch.cat((word[50:], torch.full((1, 96), torch.nan, device=device))))
    found = [
        embed_part(ids, part, begin=begin, num_words=num_words, out=word.new_full((5, 96), torch.nan))
        for part, begin, num_words in zip(parts, (0, 50), (50, 49), strict=True)
    ]
    assert torch.equal(found[0] + found[1], word[ids.long()])
    assert (found[0][2:4] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_types", [True, False])
def test_embed_layer_norm(with_types: bool, dtype: torch.dtype) -> None:
    word, position, token_type = random(11, 40, dtype=dtype), random(9, 40, dtype=dtype), random(2, 40, dtype=dtype)
    weight, bias = random(40, dtype=dtype), random(40, dtype=dtype)
    ids, positions = (torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in ([3, 10, 0], [0, 1, 6]))
    types = torch.tensor([0, 1, 1], dtype=torch.int32, device=DEVICE) if with_types else None
    actual = embed_layer_norm(
        ids, positions, types, word=word, position=position, token_type=token_type, weight=weight, bias=bias,
        eps=1e-12, position_offset=2,
    )  # fmt: skip
    total = word[ids.long()].float() + position[positions.long() + 2].float()
    total += token_type[types.long() if types is not None else 0].float()
    close(actual, F.layer_norm(total, (40,), weight.float(), bias.float(), 1e-12), dtype)
