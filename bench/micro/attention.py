"""Every attention backend on a GPU, by head dimension, mask and lengths: error, microseconds a layer, planning cost.

    python -m bench.micro.attention [--out DIR] [--only NAME] [--sizes 50x512,...] [--backends triton,fa2,...] [--plain]
    python -m bench.micro.attention --tables-of A.json B.json --out rose/attention    # no GPU

Each variant is compared with float32 (sampled rows), then timed as captured in a graph; backends for graphs are also
replayed with other lengths under the same key and compared again, then with NaN in one sequence and in the padding.
Writes attention.json, and choice_table.py: the fastest backend of each point, to be copied to rose/attention/. Made of
several files, a point is that of the last file that has it.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro.attention_points import (
    BF16,
    DEVICE,
    Buffers,
    Point,
    make_buffers,
    other_offsets,
    points,
    sampled_error,
    views,
)
from bench.micro.attention_table import TOLERANCE, latest, records_of, write_table
from bench.micro.gpu_timing import (
    BYTES_PER_S,
    FLOP_PER_S,
    Run,
    attempt,
    capture,
    graph_us,
    host_us,
    num_copies,
    save,
    versions,
    warm_cache,
)
from bench.micro.variants import attention_tiles, rope_tiles
from rose.attention.contained import ContainedBackend
from rose.attention.flash4 import Flash4Backend
from rose.attention.flashinfer_ragged import FlashInferBackend
from rose.attention.interface import AttentionShape, Sequences
from rose.attention.static import StaticAttention
from rose.attention.triton_ragged import TritonBackend
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.kernels.ragged_attention import Rope, Tiles, ragged_attention

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
    start, end = spoil(b, others)
    graph.replay()
    torch.cuda.synchronize()
    good = torch.cat([result[-1][:start], result[-1][end : others[-1]]])
    record["bad_neighbour_contained"] = bool(good.isfinite().all())
    b.qkv.normal_()
    return record


def spoil(b: Buffers, offsets: list[int]) -> tuple[int, int]:
    """NaN for the padding and, where there are others, for one sequence: which tokens. All other sequences are to stay
    finite; kernels that read past an end may multiply it by 0."""
    pairs = [(start, end) for start, end in pairwise(offsets) if end > start]
    start, end = pairs[len(pairs) // 2] if len(pairs) > 1 else (offsets[-1], offsets[-1])
    b.qkv[start:end] = math.nan
    b.qkv[offsets[-1] :] = math.nan
    return start, end


def planned(point: Point, b: Buffers, kernel: Any) -> dict[str, Any]:
    """FlashInfer planned outside graph mode (a plan whose grid fits these lengths alone)."""
    backend = FlashInferBackend(kernel, DEVICE, BF16)
    attend = backend.ragged(Sequences(b.offsets, b.cu_seqlens))
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


class CudnnVarlen:
    """torch's binding of cuDNN for packed sequences, which no public function reaches. Offsets are on the device."""

    def static(self, cu_seqlens: Tensor, num_tokens: int, shape: AttentionShape) -> "CudnnVarlen":
        self._cu_seqlens, self._max_length = cu_seqlens, num_tokens
        return self

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        """Nothing to do."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        out: Tensor = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, self._cu_seqlens, self._cu_seqlens, self._max_length, self._max_length,
            True, 0.0, shape.causal, False, scale=shape.scale,
        )[0]  # fmt: skip
        return out


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
    turned = Buffers(*views(b.qkv.clone(), point), b.cu_seqlens, b.offsets)
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

    copy = Buffers(*views(b.qkv.clone(), point), b.cu_seqlens, b.offsets)
    record = timed(point, copy, both)
    out = both(copy)
    record["error_vs_fp32"] = sampled_error(out, copy, b.offsets, point.shape)
    return record


def turn(qkv: Tensor, point: Point, positions: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> None:
    qk_norm_rope(
        qkv, q, k, positions, cos, sin,
        num_heads=point.num_heads, num_kv_heads=point.num_kv_heads, head_dim=point.head_dim,
    )  # fmt: skip


def variants(
    point: Point, backends: dict[str, Any], *, plain: bool = False
) -> Iterator[tuple[str, Callable[[Buffers], dict[str, Any]]]]:
    """(name, measurement) of everything to try at `point`. `backends`: name → backend or the error of making it;
    `plain`: these alone, as they are."""
    from torch.nn.attention import SDPBackend

    for name, backend in backends.items():
        yield name, lambda b, x=backend: static(point, b, _made(x))
    if plain:
        return
    huge = point.flops > 4e12
    if "triton" in backends and not huge:
        for tiles in attention_tiles(point.head_dim, point.length):
            yield f"triton {'/'.join(map(str, tiles))}", lambda b, t=tiles: tiled(point, b, t)
        if point.head_dim == 128 and point.num_tokens <= 128 and not point.causal:
            yield "qk_norm_rope, triton", lambda b: rope_before(point, b)
            for tiles in rope_tiles(point.length):
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
        "fa3": lambda: ContainedBackend(FlashInferBackend("fa3", DEVICE, BF16)),
        "flash4": lambda: ContainedBackend(Flash4Backend()),
        "fa3 bare": lambda: FlashInferBackend("fa3", DEVICE, BF16),
        "cudnn": CudnnVarlen,
    }
    made: dict[str, Any] = {}
    for name in names:
        try:
            made[name] = makers[name]()
        except Exception as error:  # noqa: BLE001 - recorded for every point
            made[name] = error
            print(f"{name} is not available: {type(error).__name__}: {error}")
    return made


def _made(backend: Any) -> Any:
    if isinstance(backend, Exception):
        raise backend
    return backend


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
    parser.add_argument("--sizes", default="", help="those of these sequences x lengths alone, as 50x512,1x2048")
    parser.add_argument("--backends", default="triton,fa2,fa3")
    parser.add_argument("--plain", action="store_true", help="no other tiles, nothing of torch's")
    parser.add_argument("--no-compile", action="store_true", help="the compiler's cache is filled already")
    parser.add_argument("--budget-s", type=float, default=130.0, help="points not begun by then are skipped")
    parser.add_argument("--tables-of", nargs="+", metavar="JSON", help="measure nothing: the table of earlier results")
    args = parser.parse_args()
    if args.tables_of:
        print(write_table(args.out, latest([records_of(Path(name)) for name in args.tables_of])))
        return
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    names = args.backends.split(",")
    warms = "triton" in names and not (args.no_compile or args.plain)
    compile_s = warm_cache("attention") if warms else 0.0
    print(f"compiled in {compile_s:.0f} s")
    records: list[dict[str, Any]] = []
    document = {**versions(), "compile_s": compile_s, "records": records}
    backends = make_backends(names)
    sizes = set(filter(None, args.sizes.split(",")))
    for point in points():
        if args.only not in point.name or (sizes and point.name.split()[-1] not in sizes):
            continue
        if time.perf_counter() - begin > args.budget_s:
            records.append({"case": point.name, "variant": "-", "error": "not begun: out of time"})
            continue
        buffers = make_buffers(point)
        for name, measure in variants(point, backends, plain=args.plain):
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
