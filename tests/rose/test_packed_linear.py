"""Packed layers against those they replace."""

import copy

import pytest
import torch
from torch import nn

from rose.layers.linear import FusedLinear, Linear
from rose.layers.norm import RMSNorm
from rose.layers.packed_linear import PackedLinear, pack_linears

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # absolute and relative
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no instructions for bfloat16"
)


@pytest.fixture(params=[torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize(("act", "bias"), [("identity", False), ("identity", True), ("gelu", True)])
@torch.inference_mode()
def test_same_as_linear(num_rows: int, act: str, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = Linear(24, 36, bias=bias, act=act)
    for parameter in linear.parameters():
        parameter.normal_(std=0.2)
    linear, norm = linear.to(dtype), RMSNorm(24, 1e-6).to(dtype)
    norm.weight.fill_(1.5)
    model = nn.Sequential(copy.deepcopy(linear))
    pack_linears(model)
    packed = model[0]
    assert isinstance(packed, PackedLinear)
    assert torch.equal(packed.weight, linear.weight)
    tolerance = TOLERANCES[dtype]
    x, residual = torch.randn(num_rows, 24).to(dtype), torch.randn(num_rows, 36).to(dtype)
    torch.testing.assert_close(packed(x), linear(x), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(packed(x, norm=norm), linear(x, norm=norm), atol=tolerance, rtol=tolerance)
    added = residual.clone()
    result = packed(x, residual=added)
    torch.testing.assert_close(result, linear(x, residual=residual.clone()), atol=tolerance, rtol=tolerance)
    assert result.data_ptr() == added.data_ptr()


def test_other_types_stay_as_they_are() -> None:
    model = nn.Sequential(FusedLinear(8, (4, 4)), Linear(8, 8).to(torch.float64))
    pack_linears(model)
    assert isinstance(model[0], PackedLinear)
    assert type(model[1]) is Linear
