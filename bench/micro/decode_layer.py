"""The layers of a decode step as one graph, by the launch of their attention and the blocks of their products.

    python -m bench.micro.decode_layer [--out DIR] [--only NAME] [--defaults] [--budget-s 90] [--compile I/N]

What a launch is worth depends on what stands around it: programs wait for the kernel in front, and hold up the one
behind. So choices are made by microseconds a layer, within Llama's layers (8b, 1b), random weights. `--defaults` times
what is chosen alone; `--compile` only fills Triton's cache, N processes at a time.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor

from bench.micro.gpu_timing import attempt, graph_us, save, versions
from bench.micro.random_decoders import BF16, DEVICE, llama_8b, random_model
from rose.attention.paged import PagedRows
from rose.attention.paged_triton import TritonPagedBackend
from rose.kernels import paged_attention
from rose.kernels.few_rows import Block, block_of
from rose.kernels.paged_attention import Splits
from rose.kv_cache import BLOCK_SIZE, KVShape, allocate
from rose.layers import kernel_layers
from rose.layers.device_layers import use_device_layers
from rose.models.config import ModelConfig
from rose.static_decoder import DecodeBatch

SMALL: dict[str, Any] = {"vocab_size": 4096, "max_position_embeddings": 8192}  # what layers do not read
NUM_LAYERS = {"8b": 12, "1b": 16}
BLOCKS_PER_ROW, MOST_ROWS = 256, 128
SERVED_BLOCKS = 512  # of a row, of which most are never used
CONTEXTS = (540, 4000)
NUM_KV_HEADS, GROUP = 8, 4
ROWS = {  # and queries of each
    "8b": ((1, 1), (1, 3), (1, 5), (8, 1), (4, 5), (16, 1), (16, 5), (32, 1), (64, 2), (64, 5), (128, 1)),
    "1b": ((1, 1), (1, 2), (8, 1)),
}


class Variant(NamedTuple):
    """What differs from the choice; none: nothing does."""

    splits: Splits | None = None
    product: str = ""
    block: Block | None = None

    @property
    def name(self) -> str:
        if self.splits is not None:
            return "attention " + "/".join(map(str, self.splits))
        return "default" if self.block is None else f"{self.product} {'/'.join(map(str, self.block[:5]))}"


class Point(NamedTuple):
    shape: str
    num_rows: int
    q: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.shape} rows {self.num_rows} q {self.q} context {self.context}"


def config(shape: str, num_layers: int) -> ModelConfig:
    more = {} if shape == "8b" else {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
    return llama_8b(num_layers, **SMALL, **more)


class Layers:
    """Of one shape, with caches of random keys and values."""

    def __init__(self, shape: str, num_layers: int) -> None:
        self._config, self._num_layers = config(shape, num_layers), num_layers
        self._backend = TritonPagedBackend()
        self._model = random_model(self._config)
        use_device_layers(self._model, DEVICE)

    @cached_property
    def _caches(self) -> Any:
        caches = allocate(KVShape.of(self._config, BF16), MOST_ROWS * BLOCKS_PER_ROW, DEVICE)
        for cache in caches:
            cache.k.normal_()
            cache.v.normal_()
        return caches

    def products(self) -> dict[str, tuple[int, int]]:
        """Columns and depth of those that differ in how they are made."""
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        return {"qkv": (hidden * 3 // 2, hidden), "o": (hidden, hidden), "down": (hidden, inner)}

    @torch.inference_mode()
    def us(self, point: Point, variant: Variant, *, only_compile: bool) -> float:
        """Microseconds a layer."""
        with ExitStack() as changed:
            if variant.splits is not None:
                chosen = variant.splits
                changed.enter_context(patch.object(paged_attention, "default_splits", lambda *_: chosen))
            if variant.block is not None:
                instead = self.products()[variant.product], variant.block
                changed.enter_context(patch.object(kernel_layers, "block_of", _block_of(*instead)))
            rows, batch = self._rows(point)

            def step() -> Tensor:
                return cast(Any, self._model).model(batch, self._backend.paged(rows, self._caches))  # type: ignore[no-any-return]

            if only_compile:
                step()
                torch.cuda.synchronize()
                return 0.0
            return graph_us([step], replays=15) / self._num_layers

    def _rows(self, point: Point) -> tuple[PagedRows, DecodeBatch]:
        num_rows, q, context = point[1:]
        num_tokens, size = num_rows * q, num_rows * BLOCKS_PER_ROW
        table = torch.full((num_rows, SERVED_BLOCKS), len(self._caches[0].k) - 1, dtype=torch.int32, device=DEVICE)
        table[:, :BLOCKS_PER_ROW] = torch.randperm(size, device=DEVICE).int().view(num_rows, -1)
        positions = torch.arange(context - q, context, device=DEVICE).repeat(num_rows)
        row = torch.arange(num_rows, device=DEVICE).repeat_interleave(q)
        rows = PagedRows(
            cu_seqlens_q=torch.arange(0, num_tokens + 1, q, dtype=torch.int32, device=DEVICE),
            kv_lengths=torch.full((num_rows,), context, dtype=torch.int32, device=DEVICE),
            block_table=table,
            slot_mapping=(table[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).int(),
            max_q_len=q,
            max_kv_len=SERVED_BLOCKS * BLOCK_SIZE,
        )
        ids = torch.randint(0, self._config.vocab_size, (num_tokens,), dtype=torch.int32, device=DEVICE)
        return rows, DecodeBatch(ids, positions.int())


def _block_of(product: tuple[int, int], block: Block) -> Any:
    def chosen(num_rows: int, num_columns: int, depth: int, *, gated: bool = False, norm: bool = False) -> Block | None:
        if (num_columns, depth) == product and not gated:
            return block
        return block_of(num_rows, num_columns, depth, gated=gated, norm=norm)

    return chosen


def points() -> Iterator[Point]:
    for shape, rows in ROWS.items():
        for num_rows, q in rows:
            for context in CONTEXTS:
                yield Point(shape, num_rows, q, context)


def variants(point: Point, head_dim: int) -> Iterator[Variant]:
    """The choice first."""
    yield Variant()
    programs, short = point.num_rows * NUM_KV_HEADS, point.context == CONTEXTS[0]
    if programs <= 16:
        launches = [(32, 64), (32, 128), (64, 64)]
    else:
        launches = [(4, 128), (8, 128)] if programs <= 64 else [(4, 256), (4, 4096), (1, 512)]
    tiles = [(64, 4, 3), (64, 4, 4), (32, 4, 4)] + ([(128, 4, 3)] if point.q * GROUP <= 16 and head_dim == 128 else [])
    for num_splits, min_keys in launches:
        for tile in tiles:
            if tile[0] <= min_keys:
                yield Variant(Splits(num_splits, min_keys, *tile))
    if short and point.shape == "8b" and 3 <= point.num_rows * point.q <= 16:
        for product in ("qkv", "o", "down"):
            for num_stages in (3, 4):
                yield Variant(product=product, block=Block(16, 512, 2, num_stages, 2, tiled=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="bench/results/device")
    parser.add_argument("--only", default="", help="points whose name contains this")
    parser.add_argument("--defaults", action="store_true", help="nothing but what is chosen")
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--compile", help="I/N: of every N-th variant, and time nothing")
    args = parser.parse_args()
    began, layers, records = time.perf_counter(), {}, []
    shard, of = map(int, args.compile.split("/")) if args.compile else (0, 1)
    work = [
        (point, variant)
        for point in points()
        if args.only in point.name
        for variant in variants(point, config(point.shape, 1).head_dim)
        if not args.defaults or variant == Variant()
    ]
    for point, variant in work[shard::of]:
        if time.perf_counter() - began > args.budget_s:
            print("out of time: the rest is left out", flush=True)
            break
        if point.shape not in layers:
            layers[point.shape] = Layers(point.shape, 1 if args.compile else NUM_LAYERS[point.shape])
        record = attempt(
            {"case": point.name, "variant": variant.name, "chosen": variant == Variant()},
            lambda p=point, v=variant: {"us": layers[p.shape].us(p, v, only_compile=bool(args.compile))},  # type: ignore[misc]
        )
        records.append(record)
        print(f"{point.name:36s} {variant.name:28s} {record.get('us', record.get('error'))}", flush=True)
    if not args.compile:
        save(args.out, "decode_layer.json", {**versions(), "records": records})


if __name__ == "__main__":
    main()
