"""Transposed layers against those they replace."""

import copy

import pytest
import torch
from torch import nn

from rose.layers.linear import FusedLinear, Linear
from rose.layers.norm import RMSNorm
from rose.layers.transposed_linear import TransposedLinear, num_values, transpose_linears


@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
@pytest.mark.parametrize("act", ["identity", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [36, 384, 500], ids=["one panel", "two panels", "a panel not full"])
@torch.inference_mode()
def test_same_as_linear(num_rows: int, act: str, bias: bool, width: int) -> None:
    torch.manual_seed(0)
    linear = Linear(24, width, bias=bias, act=act)
    for parameter in linear.parameters():
        parameter.normal_(std=0.2)
    other = TransposedLinear(linear, torch.full((num_values(linear) + 7,), torch.nan))
    x, residual, norm = torch.randn(num_rows, 24), torch.randn(num_rows, width), RMSNorm(24, 1e-6)
    norm.weight.uniform_(0.5, 1.5)
    torch.testing.assert_close(other(x), linear(x))
    assert torch.equal(other.weight, linear.weight)
    assert other(x).is_contiguous()
    torch.testing.assert_close(other(x, norm=norm), linear(x, norm=norm))
    added = residual.clone()
    result = other(x, residual=added)
    torch.testing.assert_close(result, linear(x, residual=residual.clone()))
    assert result.data_ptr() == added.data_ptr()


def test_every_float32_linear_is_replaced() -> None:
    model = nn.Sequential(FusedLinear(8, (4, 4)), nn.Sequential(Linear(8, 8)), Linear(8, 8).to(torch.bfloat16))
    kept = copy.deepcopy(model[2])
    transpose_linears(model)
    assert isinstance(model[0], TransposedLinear)
    assert isinstance(model[1][0], TransposedLinear)
    assert type(model[2]) is type(kept)
