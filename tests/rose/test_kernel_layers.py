"""Layers of fused kernels against the plain ones, in the interpreter: a stream whose sum is left to the next norm."""

import pytest
import torch

from rose.kernels.few_rows import MAX_ROWS
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
