"""What a kernel benchmark is made of: a case, the ways to compute it, random inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.micro.gpu_timing import Run, relative_error

DEVICE, BF16 = "cuda", torch.bfloat16

Build = Callable[[], tuple[Run, Callable[[], float]]]  # one set of buffers: (the call, its error against float32)


class Case(NamedTuple):
    """One thing to compute, in the ways it can be computed."""

    name: str
    num_bytes: float  # that must move
    flops: float
    variants: dict[str, Build]
    copies: int | None = None


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def weights(*shape: int) -> Tensor:
    return (1 + 0.1 * torch.randn(*shape, device=DEVICE)).to(BF16)


def simple(call: Callable[..., Any], make: Callable[[], tuple[Any, ...]], expected: Callable[..., Tensor]) -> Build:
    """A variant whose call takes `make`'s tensors and returns (or leaves in the first) what `expected` returns."""

    def build() -> tuple[Run, Callable[[], float]]:
        arguments = make()

        def error() -> float:
            fresh = make()
            torch.cuda.synchronize()  # constants may be read before the kernel in front has finished
            want = expected(*(x.clone() if isinstance(x, Tensor) else x for x in fresh))
            got = call(*fresh)
            return relative_error(fresh[0] if got is None else got, want)

        return (lambda: call(*arguments)), error

    return build
