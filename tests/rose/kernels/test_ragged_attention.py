"""Ragged attention against torch's, alone and with q/k norm and rotation in flight."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.kernels.ragged_attention import Rope, Tiles, default_tiles, ragged_attention
from tests.rose.kernels.test_kernels import rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
TILES = Tiles(16, 16, 4, 2)
CASES = [[1], [40], [16, 1, 33], [3, 0, 20, 0], [5, 5, 5, 5, 12]]


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """Float32, rows behind the last sequence zero."""
    out = torch.zeros(q.shape)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        parts = (x[rows].float().transpose(0, 1).cpu() for x in (q, k, v))
        out[rows] = F.scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True).transpose(0, 1)
        start += length
    return out


def packed(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    return torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(DTYPE)


def split(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> list[Tensor]:
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    return [part.unflatten(-1, (-1, head_dim)) for part in qkv.split(sizes, dim=-1)]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("head_dim", [32, 64])
def test_ragged_attention(head_dim: int, lengths: list[int], causal: bool) -> None:
    num_tokens = sum(lengths) + 19
    qkv = packed(num_tokens, 2, 1, head_dim)
    qkv[sum(lengths) :] = float("nan")  # what stands behind the sequences must not matter
    q, k, v = split(qkv, 2, 1, head_dim)
    out = torch.full(q.shape, float("nan"), dtype=DTYPE, device=DEVICE)
    ragged_attention(q, k, v, offsets(lengths), scale=head_dim**-0.5, causal=causal, tiles=TILES, out=out)
    torch.testing.assert_close(out.float().cpu(), reference(q, k, v, lengths, causal), atol=2e-2, rtol=2e-2)


def test_default_tiles() -> None:
    """A function of what a graph is captured for; the measured ones."""
    for causal in (False, True):
        assert default_tiles(128, 32, 1, causal) == default_tiles(64, 1024, 32, causal) == Tiles(64, 32, 4, 3)
        assert default_tiles(32, 8192, 256, causal) == default_tiles(32, 4096, 32, causal) == Tiles(64, 32, 4, 3)
        assert default_tiles(32, 128, 1, causal) == default_tiles(32, 12_800, 25, causal) == Tiles(64, 64, 4, 3)
        assert default_tiles(128, 128, 1, causal) == default_tiles(128, 12_800, 25, causal) == Tiles(64, 64, 4, 3)
        assert default_tiles(64, 2048, 1, causal) == Tiles(128, 64, 8, 3)


def test_a_bad_sequence_hurts_only_itself() -> None:
    lengths = [10, 20, 10]
    q, k, v = split(packed(40, 1, 1, 32), 1, 1, 32)
    v[12] = float("nan")
    out = ragged_attention(q, k, v, offsets(lengths), scale=1.0, causal=False, tiles=TILES)
    assert out[10:30].isnan().all()
    assert out[:10].isfinite().all()
    assert out[30:].isfinite().all()


def test_same_grid_other_lengths() -> None:
    """What a captured graph does: the same launch, other lengths written into the same tensor."""
    q, k, v = split(packed(64, 2, 2, 32), 2, 2, 32)
    cu_seqlens = offsets([60, 4, 0, 0])
    for lengths in ([60, 4, 0, 0], [1, 2, 3, 50], [16, 16, 16, 16], [0, 0, 0, 5]):
        cu_seqlens.copy_(offsets(lengths))
        out = ragged_attention(q, k, v, cu_seqlens, scale=32**-0.5, causal=True, tiles=TILES)
        torch.testing.assert_close(out.float().cpu(), reference(q, k, v, lengths, True), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_norm_and_rotation_in_flight(causal: bool) -> None:
    num_heads, num_kv_heads, head_dim, lengths = 4, 2, 64, [18, 0, 1, 35]
    num_tokens = sum(lengths) + 4
    cos, sin = rotation(head_dim, 64, 1e6)
    qkv = packed(num_tokens, num_heads, num_kv_heads, head_dim)
    weights = [1 + 0.1 * torch.randn(head_dim, device=DEVICE) for _ in range(2)]
    rope = Rope(*weights, cos, sin, 1e-6)
    out = ragged_attention(
        *split(qkv, num_heads, num_kv_heads, head_dim), offsets(lengths),
        scale=head_dim**-0.5, causal=causal, rope=rope, tiles=TILES,
    )  # fmt: skip
    positions = torch.cat([torch.arange(n) for n in (*lengths, 4)]).to(DEVICE, torch.int32)
    qk_norm_rope(
        qkv, *weights, positions, cos, sin,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
    )  # fmt: skip
    expected = reference(*split(qkv, num_heads, num_kv_heads, head_dim), lengths, causal)
    torch.testing.assert_close(out.float().cpu(), expected, atol=2e-2, rtol=2e-2)
