"""Layers of fused kernels against the plain ones, in the interpreter: a stream whose sum is left to the next norm."""

import pytest
import torch
import torch.nn.functional as F

from rose.distributed.group import Alone
from rose.kernels.few_rows import MAX_ROWS, block_of
from rose.layers.kernel_layers import KernelGatedMlp, KernelLinear, KernelRMSNorm, PartialSums
from rose.layers.linear import Linear
from rose.layers.mlp import GatedMlp
from rose.layers.norm import RMSNorm


def layers() -> tuple[Linear, Linear, RMSNorm]:
    torch.manual_seed(0)
    product, plain, norm = Linear(1024, 64, bias=False), Linear(64, 32, bias=False), RMSNorm(64, 1e-6)
    for layer in (product, plain, norm):
        torch.nn.init.normal_(layer.weight, 0.5, 0.1)
    return product.requires_grad_(False), plain.requires_grad_(False), norm.requires_grad_(False)


def test_a_split_product_is_added_by_the_next_norm_and_once() -> None:
    product, plain, norm = layers()
    x, stream = torch.randn(8, 1024), torch.randn(8, 64)
    expected = product(x, residual=stream.clone())
    summed = KernelLinear(product)(x, residual=stream)
    assert isinstance(summed, PartialSums)
    normed = KernelRMSNorm(norm)
    torch.testing.assert_close(normed(summed), norm(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed(summed), norm(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(KernelLinear(plain)(summed), plain(expected), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(summed.added(), expected, rtol=1e-4, atol=1e-4)


def test_a_split_product_that_meets_no_norm_is_added_all_the_same() -> None:
    product, plain, _ = layers()
    x, stream = torch.randn(8, 1024), torch.randn(8, 64)
    expected = product(x, residual=product(x, residual=stream.clone()))
    twice = KernelLinear(product)(x, residual=KernelLinear(product)(x, residual=stream))
    torch.testing.assert_close(KernelLinear(plain)(twice), plain(expected), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS, MAX_ROWS + 1])
def test_a_gated_mlp_of_few_rows_and_of_more(num_rows: int) -> None:
    torch.manual_seed(0)
    mlp, norm = GatedMlp(64, 128).half().requires_grad_(False), RMSNorm(64, 1e-6).half().requires_grad_(False)
    for parameter in (*mlp.parameters(), *norm.parameters()):
        parameter.normal_(0.1, 0.2)
    x = torch.randn(num_rows, 64).half()
    expected = mlp(x.clone(), norm)
    y = KernelGatedMlp(mlp)(x, KernelRMSNorm(norm))
    added = y.added() if isinstance(y, PartialSums) else y
    torch.testing.assert_close(added, expected, rtol=1e-2, atol=1e-2)
    assert added.data_ptr() == x.data_ptr(), "the stream, in place"


@pytest.mark.parametrize("has_room", [True, False])
def test_few_rows_of_a_product_that_is_summed_over_ranks(has_room: bool) -> None:
    torch.manual_seed(0)
    rooms: list[torch.Tensor] = []

    class Twins(Alone):
        """Two ranks that hold the same."""

        size = 2

        def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
            rooms.append(torch.full(shape, torch.nan, dtype=dtype))
            return rooms[-1] if has_room else None

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            assert (x is rooms[-1]) == has_room
            return x + x

    part = Linear(64, 48, bias=False).half().requires_grad_(False)
    part.weight.normal_(0.0, 0.2)
    part.group = Twins()
    x, stream = torch.randn(2, 64).half(), torch.randn(2, 48).half()
    expected, before = 2 * F.linear(x, part.weight), stream.clone()
    assert block_of(len(x), *part.weight.shape) is not None
    y = KernelLinear(part)(x)
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    left = KernelLinear(part)(x, residual=stream)
    assert isinstance(left, PartialSums), "left to the next norm"
    torch.testing.assert_close(stream, before)
    torch.testing.assert_close(left.added(), before + expected, rtol=1e-2, atol=1e-2)
