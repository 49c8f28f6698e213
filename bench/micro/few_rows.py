"""The products of a decode step at few rows: one kernel with what stands around it, in several blocks, and as before.

    python -m bench.micro.few_rows [--out DIR] [--only NAME] [--rows M …] [--budget-s 120]

Llama's 8B and 1B shapes, and 70B's on each of two GPUs. Weights rotate, so that none is in the L2. As before is a norm,
the library's product, SwiGLU or the addition; each way's error is against float32.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from bench.micro.cases import random, weights
from bench.micro.gpu_timing import (
    BYTES_PER_S,
    attempt,
    graph_us,
    num_copies,
    relative_error,
    save,
    versions,
    warm_cache,
)
from bench.micro.variants import PLAIN_BLOCKS, TILED_BLOCKS
from rose.kernels.activation import silu_mul
from rose.kernels.few_rows import Block, few_rows_product
from rose.kernels.norm import add_rms_norm
from rose.kernels.split_product import num_parts, split_product

EPS = 1e-5
ROWS = (1, 2, 4, 8, 16, 32)


class Product(NamedTuple):
    name: str
    columns: int  # of what comes out
    depth: int
    around: str  # norm | gated (norm and SwiGLU) | add | nothing

    @property
    def gated(self) -> bool:
        return self.around == "gated"

    @property
    def has_norm(self) -> bool:
        return self.around in ("norm", "gated")


PRODUCTS = (
    Product("1b qkv", 3072, 2048, "norm"),
    Product("1b o", 2048, 2048, "add"),
    Product("1b gate_up", 8192, 2048, "gated"),
    Product("1b down", 2048, 8192, "add"),
    Product("1b head", 128256, 2048, "nothing"),
    Product("8b qkv", 6144, 4096, "norm"),
    Product("8b o", 4096, 4096, "add"),
    Product("8b gate_up", 14336, 4096, "gated"),
    Product("8b down", 4096, 14336, "add"),
    Product("8b head", 128256, 4096, "nothing"),
    Product("70b half qkv", 5120, 8192, "nothing"),
    Product("70b half o", 8192, 4096, "nothing"),
    Product("70b half gate_up", 14336, 8192, "gated"),
    Product("70b half down", 8192, 14336, "nothing"),
)


class Inputs(NamedTuple):
    x: Tensor
    norm: Tensor
    residual: Tensor


def before(product: Product, inputs: Inputs, weight: Tensor) -> Tensor:
    x, norm, residual = inputs
    if product.has_norm:
        y = F.linear(add_rms_norm(x, None, norm, EPS), weight)
        return silu_mul(y) if product.gated else y
    if product.around == "add":
        parts = num_parts(len(x), *weight.shape)
        return residual.addmm_(x, weight.t()) if parts == 1 else split_product(x, weight, parts)
    return F.linear(x, weight)


def at_once(product: Product, inputs: Inputs, block: Block, weight: Tensor) -> Tensor:
    x, norm, residual = inputs
    has_norm = product.has_norm
    if has_norm and block.tiled:
        x, has_norm = add_rms_norm(x, None, norm, EPS), False
    return few_rows_product(
        x,
        weight,
        norm=(norm, EPS) if has_norm else None,
        gated=product.gated,
        residual=residual if product.around == "add" else None,
        block=block,
    )


def exact(product: Product, inputs: Inputs, weight: Tensor) -> Tensor:
    x, norm, residual = (part.float() for part in inputs)
    if product.has_norm:
        x = F.rms_norm(x, norm.shape, norm, EPS)
    y = x @ weight.float().T
    if product.gated:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    return y + residual if product.around == "add" else y


def ways(product: Product, inputs: Inputs) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    yield "before", partial(before, product, inputs)
    for block in (*TILED_BLOCKS, *(PLAIN_BLOCKS if len(inputs.x) <= 2 else ())):
        if product.columns % block.columns == 0 and (not block.tiled or product.depth % block.depth == 0):
            yield "/".join(map(str, block[:5])), partial(at_once, product, inputs, block)


def measure(product: Product, num_rows: int) -> list[dict[str, Any]]:
    num_columns = product.columns * (2 if product.gated else 1)
    num_bytes = 2.0 * num_columns * product.depth
    matrices = [random(num_columns, product.depth, scale=0.02) for _ in range(num_copies(num_bytes))]
    inputs = Inputs(random(num_rows, product.depth), weights(product.depth), random(num_rows, product.columns))
    records = []
    for way, call in ways(product, inputs):

        def found(call: Callable[[Tensor], Tensor] = call) -> dict[str, Any]:
            residual = inputs.residual.clone()
            got, want = call(matrices[0]), exact(product, inputs._replace(residual=residual), matrices[0])
            if got.dim() == 3:  # partial sums, which the next norm adds
                got = got.float().sum(0) + residual.float()
            error = relative_error(got, want)
            inputs.residual.zero_()
            calls = [partial(call, matrix) for matrix in matrices]
            return {"error_vs_fp32": error, "us": graph_us(calls * max(1, 16 // len(calls)))}

        record = {"product": product.name, "rows": num_rows, "way": way, "floor_us": num_bytes / BYTES_PER_S * 1e6}
        records.append(attempt(record, found))
    return records


def line(records: list[dict[str, Any]]) -> str:
    timed = sorted((r for r in records if "us" in r), key=lambda r: float(r["us"]))
    wrong = [r["way"] for r in timed if r["error_vs_fp32"] > 2e-2]
    failed = [f"{r['way']}: {r['error']}"[:120] for r in records if "us" not in r]
    first = records[0]
    best = "; ".join(
        f"{r['way']} {r['us']:.1f}" for r in timed if r["us"] < 1.3 * timed[0]["us"] or r["way"] == "before"
    )
    head = f"{first['product']:17s} {first['rows']:2d} rows  floor {first['floor_us']:6.1f}"
    return f"{head}  {best}  wrong {wrong} failed {failed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--budget-s", type=float, default=120.0)
    args = parser.parse_args()
    began = time.perf_counter()
    print(f"compiled in {warm_cache('few rows'):.0f} s", flush=True)
    records: list[dict[str, Any]] = []
    for num_rows in args.rows:
        for product in PRODUCTS:
            if args.only in product.name and time.perf_counter() - began < args.budget_s:
                found = measure(product, num_rows)
                records += found
                print(line(found), flush=True)
                save(args.out, "few_rows.json", {**versions(), "records": records})
    print(f"all: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
