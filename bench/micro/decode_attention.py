"""Attention of decode and verify rows over a paged cache, by backend and by launch: microseconds a layer.

Every call of a graph has a cache of its own, so that the L2 holds nothing that is read next. What is timed is compared
with float32 first.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro.gpu_timing import BYTES_PER_S, attempt, graph_us, num_copies, relative_error
from rose.attention.paged import PagedKV
from rose.kernels.launch import next_power_of_2
from rose.kernels.paged_attention import Splits, default_splits, new_counters, paged_attention

DEVICE, BF16, BLOCK_SIZE, HEAD_DIM = "cuda", torch.bfloat16, 16, 128
TOLERANCE = 1e-2
SERVED_KEYS = 8192  # that a row can ever have
_WORKSPACE_BYTES = 128 << 20


class Point(NamedTuple):
    num_heads: int
    num_kv_heads: int
    num_rows: int
    q: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.num_heads}:{self.num_kv_heads} rows {self.num_rows} q {self.q} context {self.context}"

    @property
    def kv_bytes(self) -> float:
        return 4.0 * self.num_rows * self.context * self.num_kv_heads * HEAD_DIM

    @property
    def floor_us(self) -> float:
        return self.kv_bytes / BYTES_PER_S * 1e6


class Layer(NamedTuple):
    q: Tensor
    cache: PagedKV


class Data(NamedTuple):
    layers: list[Layer]
    table: Tensor  # int32 [rows, blocks of each]
    cu_seqlens_q: Tensor
    kv_lengths: Tensor


def points(contexts: tuple[int, ...] = (512, 2048)) -> Iterator[Point]:
    for context in contexts:
        for heads in ((32, 8), (8, 1)):
            for num_rows in (1, 8, 32, 128):
                for q in (1, 2, 3, 4, 5) if context == 2048 and num_rows < 128 else (1, 5):
                    yield Point(*heads, num_rows, q, context)


def make(point: Point) -> Data:
    each = -(-point.context // BLOCK_SIZE)
    size = (point.num_rows * each, BLOCK_SIZE, point.num_kv_heads, HEAD_DIM)
    num_tokens = point.num_rows * point.q

    def layer() -> Layer:
        k, v = (torch.empty(size, device=DEVICE, dtype=BF16).normal_() for _ in range(2))
        q = torch.randn(num_tokens, point.num_heads, HEAD_DIM, device=DEVICE).to(BF16)
        return Layer(q, PagedKV(k, v))

    order = torch.randperm(point.num_rows * each, device=DEVICE).int()
    return Data(
        layers=[layer() for _ in range(num_copies(point.kv_bytes))],
        table=order.view(point.num_rows, each),
        cu_seqlens_q=torch.arange(0, num_tokens + 1, point.q, device=DEVICE, dtype=torch.int32),
        kv_lengths=torch.full((point.num_rows,), point.context, device=DEVICE, dtype=torch.int32),
    )


def error(out: Tensor, point: Point, data: Data) -> float:
    """Of the last row, against float32."""
    layer = data.layers[0]
    blocks = data.table[-1].long()
    k, v = (x[blocks].flatten(0, 1)[: point.context].float().transpose(0, 1) for x in layer.cache)
    q = layer.q[-point.q :].float().transpose(0, 1)
    seen = torch.arange(point.context, device=DEVICE) <= torch.arange(
        point.context - point.q, point.context, device=DEVICE
    ).unsqueeze(1)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)
    return relative_error(out[-point.q :], expected)


def timed(point: Point, data: Data, attend: Callable[[Layer], Tensor]) -> dict[str, Any]:
    found = {"error_vs_fp32": error(attend(data.layers[0]), point, data)}
    calls = [partial(attend, layer) for layer in data.layers]
    repeats = max(1, 8 // len(calls))
    found["us"] = graph_us(calls * repeats, replays=11)
    found["floor_us"] = point.floor_us
    return found


def by_triton(point: Point, data: Data, splits: Splits) -> dict[str, Any]:
    counters = new_counters(torch.device(DEVICE))

    def attend(layer: Layer) -> Tensor:
        return paged_attention(
            layer.q, *layer.cache, data.cu_seqlens_q, data.kv_lengths, data.table,
            scale=HEAD_DIM**-0.5, max_q_len=point.q, splits=splits, counters=counters,
        )  # fmt: skip

    return timed(point, data, attend)


def by_flashinfer(point: Point, data: Data) -> dict[str, Any]:
    """Tensor-core decode, planned for the graph from real lengths."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    def zeros(n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.int32, device=DEVICE)

    each, more = data.table.shape[1], {} if point.q == 1 else {"q_len_per_req": point.q}
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE), "NHD", use_cuda_graph=True,
        use_tensor_cores=True, paged_kv_indptr_buffer=zeros(point.num_rows + 1),
        paged_kv_indices_buffer=zeros(data.table.numel()), paged_kv_last_page_len_buffer=zeros(point.num_rows),
    )  # fmt: skip
    wrapper.plan(
        torch.arange(0, point.num_rows * each + 1, each, dtype=torch.int32), data.table.flatten(),
        torch.full((point.num_rows,), (point.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32),
        point.num_heads, point.num_kv_heads, HEAD_DIM, BLOCK_SIZE, q_data_type=BF16, **more,
    )  # fmt: skip
    torch.cuda.synchronize()
    return timed(point, data, lambda layer: wrapper.run(layer.q, (layer.cache.k, layer.cache.v), **more))


def variants(point: Point) -> Iterator[tuple[str, Callable[[Data], dict[str, Any]]]]:
    """Our launch as a server of long sequences makes it, and what lies around it."""
    tile_rows = next_power_of_2(max(16, point.num_heads // point.num_kv_heads * point.q))
    base = default_splits(point.num_rows, point.num_kv_heads, HEAD_DIM, SERVED_KEYS, tile_rows)
    yield "triton", lambda data: by_triton(point, data, base)
    yield "flashinfer tc", lambda data: by_flashinfer(point, data)
    if point.q not in (1, 5):
        return
    others = [base._replace(block_n=n, num_warps=warps) for n, warps in ((64, 4), (128, 4), (128, 8))]
    others.append(base._replace(num_stages=5))
    for factor in (0.5, 2):
        min_keys = max(base.block_n, int(base.min_keys / factor))
        others.append(base._replace(num_splits=max(1, int(base.num_splits * factor)), min_keys=min_keys))
    for splits in dict.fromkeys(others):
        if splits != base:
            yield _named(splits), lambda data, s=splits: by_triton(point, data, s)


def measure(only: str, left: Callable[[], float]) -> list[dict[str, Any]]:
    """Every point whose name contains `only`, as long as `left` (seconds) is positive."""
    records: list[dict[str, Any]] = []
    for point in points():
        if only not in point.name:
            continue
        if left() <= 0:
            records.append({"case": point.name, "variant": "-", "error": "not begun: out of time"})
            continue
        data = make(point)
        for name, run in variants(point):
            record = attempt({"case": point.name, "variant": name}, lambda r=run, d=data: r(d))  # type: ignore[misc]
            records.append(record | {"point": tuple(point)})
        best = sorted((r for r in records if r["case"] == point.name and is_right(r)), key=lambda r: r["us"])
        print(
            f"{point.name:36s} floor {point.floor_us:6.1f}  "
            + "; ".join(f"{r['variant']} {r['us']:.1f}" for r in best[:5]),
            flush=True,
        )
        for record in records:
            if record["case"] == point.name and not is_right(record):
                print(f"   {record['variant']}: {record.get('error', record.get('error_vs_fp32'))}", flush=True)
        del data
        torch.cuda.empty_cache()
    return records


def summary(records: list[dict[str, Any]]) -> list[str]:
    """A line a point: our default, the other backend, our best launch."""
    lines = []
    for case in dict.fromkeys(record["case"] for record in records):
        right = {r["variant"]: r["us"] for r in records if r["case"] == case and is_right(r)}
        ours = {name: us for name, us in right.items() if name.startswith("triton")}
        if ours:
            best = min(ours, key=lambda name: ours[name])
            lines.append(
                f"{case:36s} triton {right.get('triton', float('nan')):7.1f}  flashinfer tc "
                f"{right.get('flashinfer tc', float('nan')):7.1f}  best of ours {ours[best]:7.1f} ({best})"
            )
    return lines


def _named(splits: Splits) -> str:
    return "triton " + "/".join(map(str, splits))


def is_right(record: dict[str, Any]) -> bool:
    return record.get("error_vs_fp32", 1.0) < TOLERANCE
