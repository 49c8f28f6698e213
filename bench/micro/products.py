"""The four matrix products of a layer at few rows, alone and with the kernels around them, in several ways."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro.cases import Build, Case, random, weights
from bench.micro.gpu_timing import Run, relative_error
from bench.micro.variants import EPS, GEMMS, PARTS, Gemm
from rose.kernels.activation import silu_mul
from rose.kernels.norm import add_rms_norm
from rose.kernels.split_product import split_product

NUM_LAYERS = 28  # sets of weights to rotate through, as a model does

Product = Callable[[Tensor, Tensor], Tensor]  # x [M, K], weight [N, K] -> [M, N], or partial sums [P, M, N]


@contextmanager
def blas(library: str) -> Iterator[None]:
    """torch's products by `library`: cublas or cublaslt."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def by_cublaslt(x: Tensor, weight: Tensor) -> Tensor:
    with blas("cublaslt"):
        return F.linear(x, weight)


def gemm_cases(num_rows: int) -> Iterator[Case]:
    for gemm in GEMMS:
        moved = 2.0 * (gemm.columns * gemm.depth + num_rows * (gemm.depth + gemm.columns))
        variants = {
            "cublas alone": alone(gemm, num_rows, F.linear),
            "cublas + kernels": with_kernels(gemm, num_rows, F.linear),
            "cublaslt alone": alone(gemm, num_rows, by_cublaslt),
            "cublaslt + kernels": with_kernels(gemm, num_rows, by_cublaslt),
        }
        if gemm.around == "norm after":
            for parts in PARTS:
                product = partial(split_product, parts=parts)
                variants[f"split {parts} alone"] = alone(gemm, num_rows, product)
                variants[f"split {parts} + kernels"] = with_kernels(gemm, num_rows, product)
        flops = 2.0 * num_rows * gemm.columns * gemm.depth
        yield Case(
            f"gemm {gemm.name} {gemm.depth}->{gemm.columns} M={num_rows}", moved, flops, variants, copies=NUM_LAYERS
        )


def alone(gemm: Gemm, num_rows: int, product: Product) -> Build:
    def build() -> tuple[Run, Callable[[], float]]:
        x, weight = random(num_rows, gemm.depth), random(gemm.columns, gemm.depth, scale=0.02)

        def error() -> float:
            y = product(x, weight).float()
            return relative_error(y.sum(0) if y.dim() == 3 else y, x.float() @ weight.float().T)

        return (lambda: product(x, weight)), error

    return build


def with_kernels(gemm: Gemm, num_rows: int, product: Product) -> Build:
    """With the norm before it, SwiGLU behind it, or residual addition and norm behind it."""

    def build() -> tuple[Run, Callable[[], float]]:
        x, weight = random(num_rows, gemm.depth), random(gemm.columns, gemm.depth, scale=0.02)
        after = gemm.around == "norm after"
        norm_weight = weights(gemm.columns if after else gemm.depth)
        stream = random(num_rows, gemm.columns) if after else torch.zeros_like(x)

        def call() -> Tensor:
            if after:
                return add_rms_norm(product(x, weight), stream, norm_weight, EPS)
            y = product(add_rms_norm(x, stream, norm_weight, EPS), weight)
            return silu_mul(y) if gemm.around == "swiglu" else y

        def error() -> float:
            before = random(*stream.shape) if after else torch.zeros_like(stream)
            stream.copy_(before)
            torch.cuda.synchronize()
            return relative_error(call(), expected(gemm, x, weight, norm_weight, before))

        return call, error

    return build


def expected(gemm: Gemm, x: Tensor, weight: Tensor, norm_weight: Tensor, stream: Tensor) -> Tensor:
    """Float32."""

    def norm(rows: Tensor) -> Tensor:
        return F.rms_norm(rows, norm_weight.shape, norm_weight.float(), EPS)

    if gemm.around == "norm after":
        return norm(x.float() @ weight.float().T + stream.float())
    y = norm(x.float()) @ weight.float().T
    if gemm.around == "norm before":
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up
