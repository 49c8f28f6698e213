"""Layers of fused kernels against the plain ones, in the interpreter: a stream whose sum is left to the next norm."""

import torch

from rose.layers.kernel_layers import KernelLinear, KernelRMSNorm, PartialSums
from rose.layers.linear import Linear
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
