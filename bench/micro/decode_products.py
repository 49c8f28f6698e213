"""The matrix products of a Llama-8B-shaped decode step, one by one: microseconds and bytes of weight a second.

Weights rotate, so that none is in the L2. At few rows a product is the reading of its weight and nothing else.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro.gpu_timing import BYTES_PER_S, attempt, graph_us, num_copies
from bench.micro.products import blas
from rose.kernels.split_product import split_product

DEVICE, BF16 = "cuda", torch.bfloat16
SHAPES = {  # columns, depth
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 8, 32, 128)


def ways(x: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Tensor], str]]:
    """(name, product, library)"""
    yield "cublas", partial(F.linear, x), "cublas"
    yield "cublaslt", partial(F.linear, x), "cublaslt"
    if len(x) == 1:
        yield "mv", lambda weight: torch.mv(weight, x[0]), "cublas"
    for parts in (2, 4):
        yield f"{parts} partial sums", lambda weight, p=parts: split_product(x, weight, p), "cublas"


def measure(left: Callable[[], float]) -> list[dict[str, Any]]:
    records = []
    for name, (columns, depth) in SHAPES.items():
        num_bytes = 2.0 * columns * depth
        size, copies = (columns, depth), num_copies(num_bytes)
        weights = [torch.empty(size, device=DEVICE, dtype=BF16).normal_(0, 0.02) for _ in range(copies)]
        for num_rows in ROWS:
            if left() <= 0:
                return records
            x = torch.randn(num_rows, depth, device=DEVICE).to(BF16)
            found = []
            for way, product, library in ways(x):
                record = {"product": name, "rows": num_rows, "way": way}
                record["floor_us"] = num_bytes / BYTES_PER_S * 1e6
                record |= attempt({}, lambda p=product, w=weights, b=library: timed(p, w, b))  # type: ignore[misc]
                found.append(record)
            records += found
            right = sorted((r for r in found if "us" in r), key=lambda r: r["us"])
            print(f"   {name:8s} {num_rows:4d} rows  floor {found[0]['floor_us']:6.1f}  "
                  + "; ".join(f"{r['way']} {r['us']:.1f}" for r in right), flush=True)  # fmt: skip
        del weights
        torch.cuda.empty_cache()
    return records


def timed(product: Callable[[Tensor], Tensor], weights: list[Tensor], library: str) -> dict[str, Any]:
    calls = [partial(product, weight) for weight in weights]
    with blas(library):
        return {"us": graph_us(calls * max(1, 16 // len(calls)))}
