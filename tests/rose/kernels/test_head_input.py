"""What a draft head begins with, against torch."""

import pytest
import torch

from rose.kernels.head_input import side_by_side
from rose.layers.norm import RMSNorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize("norms", [False, True])
def test_side_by_side(dtype: torch.dtype, size: int, norms: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(3, size, generator=generator).to(DEVICE, dtype) * 3 for _ in range(2))
    weights = tuple((torch.rand(size, generator=generator) + 0.5).to(DEVICE, dtype) for _ in range(2))
    expected = [left, right]
    if norms:
        for half, weight in enumerate(weights):
            norm = RMSNorm(size, EPS).to(DEVICE, dtype)
            norm.weight.data.copy_(weight)
            expected[half] = norm(expected[half])
    found = side_by_side(left, right, weights if norms else None, EPS)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype] if norms else 0.0
    torch.testing.assert_close(found, torch.cat(expected, 1).detach(), atol=tolerance, rtol=tolerance)
