"""Every attention backend on a GPU, by head dimension, mask and lengths: error, microseconds a layer, planning cost.

    python -m bench.micro.attention [--out DIR] [--only NAME] [--backends triton,fa2,...]
    python -m bench.micro.attention --tables-of A.json B.json --out rose/attention    # no GPU

Each variant is compared with float32 (sampled rows), then timed as captured in a graph; backends for graphs are also
replayed with other lengths under the same key and compared again. Writes attention.json, and choice_table.py: the
fastest backend of each point, to be copied to rose/attention/.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro.gpu_timing import (
    BYTES_PER_S,
    FLOP_PER_S,
    Run,
    attempt,
    capture,
    graph_us,
    host_us,
    num_copies,
    relative_error,
    save,
    versions,
    warm_cache,
)
from bench.micro.variants import ROPE_TILES, attention_tiles
from rose.attention.flash4 import Flash4Backend
from rose.attention.flashinfer_ragged import FlashInferBackend
from rose.attention.interface import AttentionShape
from rose.attention.static import StaticAttention
from rose.attention.triton_ragged import TritonBackend
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.kernels.ragged_attention import Rope, Tiles, ragged_attention

DEVICE, BF16 = "cuda", torch.bfloat16
TOLERANCE = 1e-2
LATENCY_TOKENS = 1024  # up to here a step is waited for, and the host's planning with it
LAYERS = {32: 6, 64: 24, 128: 28}

TABLE_HEAD = '''"""The fastest attention backend, measured on an H200: (head_dim, causal, sequences, tokens, backend).

Written by `python -m bench.micro.attention`; do not edit by hand.
"""

TABLE: tuple[tuple[int, bool, int, int, str], ...] = (
'''


class Point(NamedTuple):
    """N sequences of equal length."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    causal: bool
    num_seqs: int
    length: int

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5, self.causal)

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.length

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"d{self.head_dim} {self.num_heads}:{self.num_kv_heads} {mask} {self.num_seqs}x{self.length}"

    @property
    def flops(self) -> float:
        whole = 4.0 * self.num_seqs * self.length**2 * self.num_heads * self.head_dim
        return whole / 2 if self.causal else whole

    @property
    def num_bytes(self) -> float:
        return 2.0 * self.num_tokens * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)


LENGTHS = {
    32: ((1, 32), (1, 128), (1, 512), (32, 32), (256, 32), (32, 128), (25, 512)),
    64: ((1, 32), (1, 128), (1, 512), (1, 2048), (1, 8192), (32, 32), (5, 512), (25, 512)),
    128: ((1, 32), (1, 128), (1, 512), (1, 1024), (1, 4096), (1, 16384), (1, 32768), (8, 128), (32, 32), (5, 512),
          (25, 512)),
}  # fmt: skip


def points() -> Iterator[Point]:
    for causal in (False, True):
        yield from (Point(128, 16, 8, causal, *size) for size in LENGTHS[128])
    yield from (Point(64, 16, 16, False, *size) for size in LENGTHS[64])
    yield from (Point(32, 12, 12, False, *size) for size in LENGTHS[32])


class Buffers(NamedTuple):
    """q, k and v are views of one packed buffer, as a model's projection leaves them."""

    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    offsets: list[int]


def make_buffers(point: Point) -> Buffers:
    heads, kv, dim = point.num_heads, point.num_kv_heads, point.head_dim
    qkv = torch.randn(point.num_tokens, (heads + 2 * kv) * dim, device=DEVICE).to(BF16)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in qkv.split([heads * dim, kv * dim, kv * dim], dim=-1))
    offsets = list(range(0, point.num_tokens + 1, point.length))
    return Buffers(qkv, q, k, v, torch.tensor(offsets, dtype=torch.int32, device=DEVICE), offsets)


def sampled_error(out: Tensor, b: Buffers, offsets: list[int], shape: AttentionShape) -> float:
    """Against float32, up to 256 rows each of the first, middle and last sequences that are not empty."""
    pairs = [(s, e) for s, e in pairwise(offsets) if e > s]
    got, want = [], []
    for start, end in {pairs[0], pairs[len(pairs) // 2], pairs[-1]}:
        rows = torch.arange(start, end, max(1, (end - start) // 256), device=DEVICE)
        rows[-1] = end - 1
        q = b.q[rows].float().transpose(0, 1)
        group = shape.num_heads // shape.num_kv_heads
        k, v = (x[start:end].float().transpose(0, 1).repeat_interleave(group, 0) for x in (b.k, b.v))
        scores = q @ k.transpose(1, 2) * shape.scale
        if shape.causal:
            key = torch.arange(start, end, device=DEVICE)
            scores.masked_fill_(key[None, :] > rows[:, None], -math.inf)
        got.append(out[rows].flatten())
        want.append((scores.softmax(-1) @ v).transpose(0, 1).flatten())
    return relative_error(torch.cat(got), torch.cat(want))


def other_offsets(point: Point) -> list[int]:
    """Other lengths under the same key, empty sequences and padding rows among them."""
    generator = torch.Generator().manual_seed(7)
    used = point.num_tokens - point.num_tokens // 5
    cuts = sorted(torch.randint(0, used + 1, (point.num_seqs - 1,), generator=generator).tolist())
    return [0, *cuts, used]


# --- variants: each returns a record ------------------------------------------------------------------------


def timed(point: Point, first: Buffers, attend: Callable[[Buffers], Tensor]) -> dict[str, Any]:
    """Error and time of `attend`, over rotated buffers."""
    error = sampled_error(attend(first), first, first.offsets, point.shape)
    floor_us = max(point.flops / FLOP_PER_S, point.num_bytes / BYTES_PER_S) * 1e6
    big = floor_us > 1000
    sets = [first] if big else [first, *(make_buffers(point) for _ in range(num_copies(point.num_bytes, 12) - 1))]
    calls: list[Run] = [partial(attend, buffers) for buffers in sets]
    took = graph_us(calls, replays=5 if big else 11)
    return {"error_vs_fp32": error, "us": took, "floor_us": floor_us, "of_floor": took / floor_us}


def static(point: Point, b: Buffers, backend: Any) -> dict[str, Any]:
    """A backend as a graph uses it: captured once, replayed with other lengths."""
    cu_seqlens = b.cu_seqlens.clone()
    attention: StaticAttention = backend.static(cu_seqlens, point.num_tokens, point.shape)
    attention.prepare(b.offsets)
    record = timed(point, b, lambda x: attention(x.q, x.k, x.v, point.shape))
    others = other_offsets(point)
    turns = [b.offsets, others]

    def prepare() -> None:
        turns.reverse()
        attention.prepare(turns[0])

    record["prepare_us"] = host_us(prepare)
    attention.prepare(b.offsets)
    result: list[Tensor] = []
    graph = capture([lambda: result.append(attention(b.q, b.k, b.v, point.shape))])
    cu_seqlens.copy_(torch.tensor(others, dtype=torch.int32))
    attention.prepare(others)
    graph.replay()
    torch.cuda.synchronize()
    record["other_lengths_error"] = sampled_error(result[-1], b, others, point.shape)
    record["padding_finite"] = bool(result[-1][others[-1] :].isfinite().all())
    if point.num_seqs > 1:
        attention.prepare(b.offsets)
        cu_seqlens.copy_(b.cu_seqlens)
        record["bad_neighbour_contained"] = neighbour_contained(point, b, attention)
    return record


def neighbour_contained(point: Point, b: Buffers, attention: StaticAttention) -> bool:
    """Whether NaN in one sequence leaves all others finite: kernels that read past an end may multiply it by 0."""
    bad = b.qkv.clone()
    start, end = b.offsets[point.num_seqs // 2 : point.num_seqs // 2 + 2]
    bad[start:end] = math.nan
    _, q, k, v = _views(bad, point)
    out = attention(q, k, v, point.shape)
    return bool(out[:start].isfinite().all() and out[end:].isfinite().all())


def planned(point: Point, b: Buffers, kernel: Any) -> dict[str, Any]:
    """FlashInfer planned outside graph mode (a plan whose grid fits these lengths alone)."""
    backend = FlashInferBackend(kernel, DEVICE, BF16)
    attend = backend.ragged(_sequences(b))
    return timed(point, b, lambda x: attend(x.q, x.k, x.v, point.shape))


def sdpa(point: Point, b: Buffers, kernel: Any) -> dict[str, Any]:
    """torch's dense attention, possible because the lengths are equal."""
    from torch.nn.attention import sdpa_kernel

    def attend(x: Buffers) -> Tensor:
        q, k, v = (t.unflatten(0, (point.num_seqs, -1)).transpose(1, 2) for t in (x.q, x.k, x.v))
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=point.causal, scale=point.shape.scale,
                enable_gqa=point.num_heads != point.num_kv_heads,
            )  # fmt: skip
        return out.transpose(1, 2).reshape(point.num_tokens, point.num_heads, point.head_dim)

    return timed(point, b, attend)


def varlen(point: Point, b: Buffers) -> dict[str, Any]:
    """torch.nn.attention.varlen, whose arguments differ between releases."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    arguments: dict[str, Any] = {}
    group = point.num_heads // point.num_kv_heads
    if "enable_gqa" in known:
        arguments["enable_gqa"] = group > 1
    if "is_causal" in known:
        arguments["is_causal"] = point.causal
    elif point.causal:
        arguments["window_size"] = (-1, 0)

    def attend(x: Buffers) -> Tensor:
        k, v = x.k, x.v
        if group > 1 and "enable_gqa" not in known:
            k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        return varlen_attn(x.q, k, v, x.cu_seqlens, x.cu_seqlens, point.length, point.length, **arguments)

    return timed(point, b, attend)


def tiled(point: Point, b: Buffers, tiles: Tiles) -> dict[str, Any]:
    def attend(x: Buffers) -> Tensor:
        return ragged_attention(
            x.q, x.k, x.v, x.cu_seqlens, scale=point.shape.scale, causal=point.causal, tiles=tiles
        )  # fmt: skip

    return timed(point, b, attend)


def rope_parts(point: Point) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dim = point.head_dim
    frequencies = 1e6 ** -(torch.arange(0, dim, 2, device=DEVICE) / dim)
    angles = torch.outer(torch.arange(point.length, device=DEVICE).float(), frequencies)
    q_weight, k_weight = ((1 + 0.1 * torch.randn(dim, device=DEVICE)).to(BF16) for _ in range(2))
    positions = torch.arange(point.num_tokens, device=DEVICE, dtype=torch.int32) % point.length
    return angles.cos(), angles.sin(), q_weight, k_weight, positions


def rope_in_flight(point: Point, b: Buffers, tiles: Tiles) -> dict[str, Any]:
    """q/k norm and rotation inside attention. Compare with `triton` plus the qk_norm_rope kernel."""
    cos, sin, q_weight, k_weight, positions = rope_parts(point)
    rope = Rope(q_weight, k_weight, cos, sin, 1e-6)

    def attend(x: Buffers) -> Tensor:
        return ragged_attention(
            x.q, x.k, x.v, x.cu_seqlens, scale=point.shape.scale, causal=point.causal, rope=rope, tiles=tiles
        )

    out = attend(b)
    turned = Buffers(*_views(b.qkv.clone(), point), b.cu_seqlens, b.offsets)
    turn(turned.qkv, point, positions, cos, sin, q_weight, k_weight)
    record = timed(point, b, attend)
    record["error_vs_fp32"] = sampled_error(out, turned, b.offsets, point.shape)
    return record


def rope_before(point: Point, b: Buffers) -> dict[str, Any]:
    """The two kernels that `rope_in_flight` replaces, timed together (the rotation is repeated in place)."""
    cos, sin, q_weight, k_weight, positions = rope_parts(point)

    def both(x: Buffers) -> Tensor:
        turn(x.qkv, point, positions, cos, sin, q_weight, k_weight)
        return ragged_attention(x.q, x.k, x.v, x.cu_seqlens, scale=point.shape.scale, causal=point.causal)

    copy = Buffers(*_views(b.qkv.clone(), point), b.cu_seqlens, b.offsets)
    record = timed(point, copy, both)
    out = both(copy)
    record["error_vs_fp32"] = sampled_error(out, copy, b.offsets, point.shape)
    return record


def turn(qkv: Tensor, point: Point, positions: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> None:
    qk_norm_rope(
        qkv, q, k, positions, cos, sin,
        num_heads=point.num_heads, num_kv_heads=point.num_kv_heads, head_dim=point.head_dim,
    )  # fmt: skip


def _views(qkv: Tensor, point: Point) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, kv, dim = point.num_heads, point.num_kv_heads, point.head_dim
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in qkv.split([heads * dim, kv * dim, kv * dim], dim=-1))
    return qkv, q, k, v


def _sequences(b: Buffers) -> Any:
    from rose.attention.interface import Sequences

    return Sequences(b.offsets, b.cu_seqlens)


def variants(point: Point, backends: dict[str, Any]) -> Iterator[tuple[str, Callable[[Buffers], dict[str, Any]]]]:
    """(name, measurement) of everything to try at `point`. `backends`: name → backend or the error of making it."""
    from torch.nn.attention import SDPBackend

    for name, backend in backends.items():
        yield name, lambda b, x=backend: static(point, b, _made(x))
    huge = point.flops > 4e12
    if "triton" in backends and not huge:
        for tiles in attention_tiles(point.head_dim):
            yield f"triton {'/'.join(map(str, tiles))}", lambda b, t=tiles: tiled(point, b, t)
        if point.head_dim == 128 and point.length <= 512 and not point.causal:
            yield "qk_norm_rope, triton", lambda b: rope_before(point, b)
            for tiles in ROPE_TILES:
                yield f"triton with rope {'/'.join(map(str, tiles))}", lambda b, t=tiles: rope_in_flight(point, b, t)
    for name in ("fa2", "fa3"):
        if name in backends:
            yield f"{name} planned", lambda b, k=name: planned(point, b, k)
    if "torch" in backends or "triton" in backends:
        yield "torch flash", lambda b: sdpa(point, b, SDPBackend.FLASH_ATTENTION)
        yield "torch cudnn", lambda b: sdpa(point, b, SDPBackend.CUDNN_ATTENTION)
        yield "torch varlen", lambda b: varlen(point, b)


def make_backends(names: list[str]) -> dict[str, Any]:
    makers: dict[str, Callable[[], Any]] = {
        "triton": TritonBackend,
        "fa2": lambda: FlashInferBackend("fa2", DEVICE, BF16),
        "fa3": lambda: FlashInferBackend("fa3", DEVICE, BF16),
        "flash4": Flash4Backend,
    }
    made: dict[str, Any] = {}
    for name in names:
        try:
            made[name] = makers[name]()
        except Exception as error:  # noqa: BLE001 recorded for every point
            made[name] = error
            print(f"{name} is not available: {type(error).__name__}: {error}")
    return made


def _made(backend: Any) -> Any:
    if isinstance(backend, Exception):
        raise backend
    return backend


def best(point: Point, records: list[dict[str, Any]]) -> str | None:
    """The backend with the least time for a whole step: all layers, and for short steps the planning before them."""
    right = [
        r for r in records
        if r["case"] == point.name and "prepare_us" in r and r["error_vs_fp32"] < TOLERANCE
        and r["other_lengths_error"] < TOLERANCE and r["padding_finite"]
    ]  # fmt: skip
    if not right:
        return None
    planning = 1 if point.num_tokens <= LATENCY_TOKENS else 0
    fastest = min(right, key=lambda r: r["us"] * LAYERS[point.head_dim] + planning * r["prepare_us"])
    return str(fastest["variant"])


def write_table(directory: str | None, records: list[dict[str, Any]]) -> str:
    lines = [
        f'    ({p.head_dim}, {p.causal}, {p.num_seqs}, {p.num_tokens}, "{winner}"),'
        for p in points()
        if (winner := best(p, records)) is not None
    ]
    text = TABLE_HEAD + "\n".join(lines) + "\n)\n"
    if directory is not None:
        (Path(directory) / "choice_table.py").write_text(text)
    return text


def line(record: dict[str, Any]) -> str:
    head = f"{record['case']:28s} {record['variant']:32s}"
    if "error" in record:
        return f"{head} FAILED {record['error'][:160]}"
    text = f"{head} err {record['error_vs_fp32']:.1e} {record['us']:9.2f} us  x{record['of_floor']:.2f} of floor"
    if "prepare_us" in record:
        text += f"  prepare {record['prepare_us']:.0f} us, other lengths {record['other_lengths_error']:.1e}"
        if not record.get("bad_neighbour_contained", True):
            text += "  NaN SPREADS"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for attention.json and choice_table.py")
    parser.add_argument("--only", default="", help="points whose name contains this")
    parser.add_argument("--backends", default="triton,fa2,fa3")
    parser.add_argument("--no-compile", action="store_true", help="the compiler's cache is filled already")
    parser.add_argument("--budget-s", type=float, default=130.0, help="points not begun by then are skipped")
    parser.add_argument("--tables-of", nargs="+", metavar="JSON", help="measure nothing: the table of earlier results")
    args = parser.parse_args()
    if args.tables_of:
        earlier = [json.loads(Path(name).read_text())["records"] for name in args.tables_of]
        print(write_table(args.out, [record for records in earlier for record in records]))
        return
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    names = args.backends.split(",")
    compile_s = warm_cache("attention") if "triton" in names and not args.no_compile else 0.0
    print(f"compiled in {compile_s:.0f} s")
    records: list[dict[str, Any]] = []
    document = {**versions(), "compile_s": compile_s, "records": records}
    backends = make_backends(names)
    for point in points():
        if args.only not in point.name:
            continue
        if time.perf_counter() - begin > args.budget_s:
            records.append({"case": point.name, "variant": "-", "error": "not begun: out of time"})
            continue
        buffers = make_buffers(point)
        for name, measure in variants(point, backends):
            record = attempt({"case": point.name, "variant": name}, lambda m=measure, b=buffers: m(b))
            records.append(record)
            print(line(record), flush=True)
        save(args.out, "attention.json", document)
        torch.cuda.empty_cache()
    print("\n=== fastest per point (us a layer) ===")
    for point in points():
        good = [r for r in records if r["case"] == point.name and r.get("error_vs_fp32", 1.0) < TOLERANCE]
        good.sort(key=lambda r: r["us"])
        if good:
            print(f"{point.name} (floor {good[0]['floor_us']:.1f}): "
                  + "; ".join(f"{r['variant']} {r['us']:.1f}" for r in good[:5]))  # fmt: skip
    print(write_table(args.out, records))
    print(f"total {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
