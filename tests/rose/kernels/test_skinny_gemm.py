"""Skinny products with norm, SwiGLU and residual folded in, against torch in float32."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.skinny_gemm import Tiles, Workspace, default_tiles, fold_norm, skinny_gemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("num_rows", [1, 32, 37])
def test_norm_folded_in(num_rows: int) -> None:
    x, weight, norm_weight = random(num_rows, 128), random(64, 128, scale=0.1), 1 + random(128, scale=0.1)
    normed = F.rms_norm(x.float(), (128,), norm_weight.float(), 1e-6)
    tiles = Tiles(32, 32, 64, 1, 4, 2)
    close(skinny_gemm(x, fold_norm(weight, norm_weight), norm_eps=1e-6, tiles=tiles), normed @ weight.float().T)
    close(skinny_gemm(x, weight, tiles=tiles), x.float() @ weight.float().T)


def test_silu_mul() -> None:
    x, weight, norm_weight = random(20, 128), random(64, 128, scale=0.1), 1 + random(128, scale=0.1)
    gate, up = (F.rms_norm(x.float(), (128,), norm_weight.float(), 1e-6) @ weight.float().T).chunk(2, dim=-1)
    folded = fold_norm(weight, norm_weight)
    out = skinny_gemm(x, folded, epilogue="silu_mul", norm_eps=1e-6, tiles=Tiles(16, 16, 64, 1, 4, 2))
    close(out, F.silu(gate) * up)


@pytest.mark.parametrize("split_k", [1, 4])
def test_residual(split_k: int) -> None:
    x, weight, residual = random(20, 256), random(32, 256, scale=0.1), random(20, 32)
    expected = x.float() @ weight.float().T + residual.float()
    workspace = Workspace(DEVICE, 4096, 64)
    tiles = Tiles(16, 16, 64, split_k, 4, 2)
    for _ in range(2):  # the counters are back at zero after each product
        stream = residual.clone()
        out = skinny_gemm(x, weight, epilogue="residual", residual=stream, out=stream, workspace=workspace, tiles=tiles)
        close(out, expected)
    assert (workspace.arrived == 0).all()


def test_what_does_not_fit_is_refused() -> None:
    x, weight = random(4, 128), random(48, 128)
    with pytest.raises(AssertionError, match="other tiles"):
        skinny_gemm(x, weight, tiles=Tiles(16, 32, 64, 1, 4, 2))
    with pytest.raises(AssertionError, match="workspace"):
        skinny_gemm(x, weight, tiles=Tiles(16, 16, 64, 2, 4, 2))


def test_default_tiles_divide() -> None:
    for num_rows in (1, 64, 128, 512):
        for columns, k, epilogue in ((4096, 1024, "none"), (1024, 2048, "residual"), (3072, 1024, "silu_mul")):
            tiles = default_tiles(num_rows, columns, k, epilogue)  # type: ignore[arg-type]
            assert columns % tiles.block_n == 0
            assert k % (tiles.block_k * tiles.split_k) == 0
