"""GPU time of whole encoder steps as the server runs them: graphs, gaps, memory, kernels, tokens a step.

    python -m bench.micro.encoder_graph [--out DIR] [--quick]

Weights and ids are random, bfloat16. Times are medians of replays between events; the floor is the larger of weight
bytes over 4.3 TB/s and operations over 790 TFLOP/s, the ceilings measured on an H200.
"""

import argparse
import statistics
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.micro.gpu_timing import BYTES_PER_S, FLOP_PER_S, save, versions
from bench.micro.random_encoders import SHAPES, Bench, Shape
from rose.kernels.launch import use_pdl
from rose.models.config import ModelConfig

LARGE = [(1, 128), (1, 512), (1, 4096), (5, 512), (25, 512), (50, 512), (100, 512)]
SMALL = [(1, 32), (32, 32), (256, 32)]
CURVE = [1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 51200]
NUM_QUEUED = 200


def floor_ms(model: ModelConfig, num_seqs: int, length: int) -> float:
    heads, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    per_layer = model.hidden_size * (2 * heads + 2 * kv + (3 if model.gated else 2) * model.intermediate_size)
    weights = per_layer * model.num_hidden_layers
    pairs = num_seqs * length * length / (2 if model.causal else 1)
    operations = 2 * weights * num_seqs * length + 4 * pairs * heads * model.num_hidden_layers
    return 1e3 * max(2 * weights / BYTES_PER_S, operations / FLOP_PER_S)


def replay_ms(bench: Bench, lengths: list[int], replays: int = 21) -> float:
    """Median of a captured step's replays, its inputs in place."""
    bench.fill(lengths)
    for _ in range(3):
        bench.run(lengths)
    graph = bench.encoder.graphs.graph(bench.encoder.key(len(lengths), sum(lengths)))
    assert graph is not None, f"{lengths[:1]}×{len(lengths)} was not captured: raise max_graph_tokens"
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def step_ms(bench: Bench, lengths: list[int], steps: int = 50) -> tuple[float, float]:
    """Median and worst from launch to results in the slot, one step at a time."""
    bench.fill(lengths)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        bench.run(lengths)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times), max(times)


def queued_gap(bench: Bench, lengths: list[int]) -> dict[str, float]:
    """What lies between replays when the next step is always launched before the last is done: share of the time."""
    for slot in range(2):
        bench.fill(lengths, slot)
        bench.run(lengths, slot)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    started, launching = time.perf_counter(), 0.0
    in_flight = []
    for step in range(NUM_QUEUED):
        before = time.perf_counter()
        in_flight.append(bench.launch(lengths, step % 2))
        launching += time.perf_counter() - before
        if len(in_flight) == 2:
            oldest = in_flight.pop(0)
            while not oldest.ready():
                pass
    end.record()
    torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - started) * 1e3
    busy = profile_busy_ms(bench, lengths)
    return {
        "step_ms": begin.elapsed_time(end) / NUM_QUEUED,
        "wall_ms": wall_ms / NUM_QUEUED,
        "launch_us": launching / NUM_QUEUED * 1e6,
        "busy_ms": busy,
    }


def profile_busy_ms(bench: Bench, lengths: list[int]) -> float:
    """Time between the first kernel of a replay and the end of its last, from a trace of queued steps."""
    spans = []
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        in_flight = [bench.launch(lengths, step % 2) for step in range(2)]
        for step in range(20):
            while not in_flight[0].ready():
                pass
            in_flight = [in_flight[1], bench.launch(lengths, step % 2)]
        torch.cuda.synchronize()
    kernels = sorted(
        ((e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.device_type.name == "CUDA"),
    )
    begin = None
    last = 0.0
    for start, stop, name in kernels:
        if name.startswith("Memcpy"):
            if begin is not None and last > begin:
                spans.append(last - begin)
            begin = None
        else:
            begin = start if begin is None else begin
            last = max(last, stop)
    return statistics.median(spans) / 1e3 if spans else float("nan")


def kernels(bench: Bench, lengths: list[int]) -> dict[str, Any]:
    bench.fill(lengths)
    bench.run(lengths)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        bench.run(lengths)
        torch.cuda.synchronize()
    count: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in trace.events():
        if event.device_type.name == "CUDA":
            count[event.name[:56]] += 1
            microseconds[event.name[:56]] += event.device_time
    return {
        "num_kernels": sum(n for name, n in count.items() if not name.startswith("Mem")),
        "num_copies": sum(n for name, n in count.items() if name.startswith("Mem")),
        "top": [(name, count[name], round(total)) for name, total in microseconds.most_common(12)],
    }


def measure_shape(shape: Shape, cases: list[tuple[int, int]], profiled: list[tuple[int, int]]) -> dict[str, Any]:
    bench = Bench(shape, max_num_batched_tokens=max(n * length for n, length in cases), max_num_seqs=256)
    rows, started = [], time.perf_counter()
    for num_seqs, length in cases:
        lengths = [length] * num_seqs
        gpu = replay_ms(bench, lengths, 21 if num_seqs * length < 30000 else 9)
        floor = floor_ms(shape.model, num_seqs, length)
        middle, worst = step_ms(bench, lengths, 60 if gpu < 10 else 10)
        row = {
            "shape": shape.name,
            "case": f"{num_seqs}x{length}",
            "backend": bench.encoder.key(num_seqs, num_seqs * length).backend,
            "gpu_ms": gpu,
            "floor_ms": floor,
            "step_ms": middle,
            "step_worst_ms": worst,
            "tokens_per_s": num_seqs * length / gpu * 1e3,
        }
        rows.append(row)
        print(
            f"{shape.name:22} {row['case']:>8} {row['backend']:>7}  gpu {gpu:8.3f} ms  floor {floor:7.3f}  "
            f"×{gpu / floor:4.2f}  step {middle:8.3f} (worst {worst:.3f})  {row['tokens_per_s'] / 1e6:.3f} Mtok/s"
        )
    for num_seqs, length in profiled:
        found = kernels(bench, [length] * num_seqs)
        rows.append({"shape": shape.name, "case": f"{num_seqs}x{length}", "kernels": found})
        print(f"   {num_seqs}x{length}: {found['num_kernels']} kernels, {found['num_copies']} copies")
        for name, count, total in found["top"]:
            print(f"      {count:4} × {name:56} {total:7} us")
    figures = bench.encoder.figures()
    print(
        f"   {figures['graphs']} graphs, {figures['graph_memory_bytes'] / 2**20:.0f} MiB, "
        f"{1e3 * figures['graph_capture_seconds_total'] / max(1, figures['graph_captures_total']):.1f} ms a capture, "
        f"longest {1e3 * figures['graph_longest_capture_seconds']:.0f} ms; {time.perf_counter() - started:.1f} s in all"
    )
    bench.close()
    return {"rows": rows, "figures": figures}


def measure_gaps(shape: Shape) -> list[dict[str, Any]]:
    bench = Bench(shape, max_num_batched_tokens=16384)
    found = []
    for num_seqs, length in ((1, 128), (1, 512), (5, 512)):
        lengths = [length] * num_seqs
        gpu = replay_ms(bench, lengths)
        row = {"case": f"{num_seqs}x{length}", "gpu_ms": gpu, **queued_gap(bench, lengths)}
        row["gap"] = 1 - row["busy_ms"] / row["step_ms"]
        found.append(row)
        print(
            f"   {NUM_QUEUED} queued {row['case']:>6}: {row['step_ms']:.3f} ms a step, busy {row['busy_ms']:.3f}, "
            f"gap {100 * row['gap']:.1f} %, launch {row['launch_us']:.0f} us"
        )
    bench.close()
    return found


def measure_curve(shape: Shape, seconds: float) -> list[dict[str, float]]:
    """Tokens/s against tokens a step, steady state: two steps in flight for `seconds` at each size."""
    bench = Bench(shape, max_num_batched_tokens=max(CURVE))
    found = []
    for num_tokens in CURVE:
        lengths = [512] * (num_tokens // 512)
        for slot in range(2):
            bench.fill(lengths, slot)
            for _ in range(2):
                bench.run(lengths, slot)
        in_flight = [bench.launch(lengths, slot) for slot in range(2)]
        started, steps = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            while not in_flight[0].ready():
                pass
            in_flight = [in_flight[1], bench.launch(lengths, steps % 2)]
            steps += 1
        rate = steps * num_tokens / (time.perf_counter() - started)
        bench.encoder.drain()
        found.append({"num_tokens": num_tokens, "tokens_per_s": rate})
    best = max(row["tokens_per_s"] for row in found)
    for row in found:
        rate = row["tokens_per_s"]
        print(f"   {row['num_tokens']:6} tokens a step: {rate / 1e3:7.1f} ktok/s  {rate / best:6.1%}")
    bench.close()
    return found


def measure_launch(shape: Shape, lengths: list[int]) -> list[dict[str, Any]]:
    """What of a step the host pays for, with and without programmatic dependent launch, while the GPU is busy."""
    found = []
    for enabled in (True, False):
        use_pdl(enabled)
        bench = Bench(shape, max_num_batched_tokens=4096)
        gpu = replay_ms(bench, lengths)
        graph = bench.encoder.graphs.graph(bench.encoder.key(len(lengths), sum(lengths)))
        assert graph is not None
        times = []
        for _ in range(50):
            bench.launch(lengths)
            started = time.perf_counter()
            graph.replay()
            times.append((time.perf_counter() - started) * 1e6)
            bench.encoder.drain()
        row = {"pdl": enabled, "gpu_ms": gpu, "replay_us": statistics.median(times), **queued_gap(bench, lengths)}
        middle, worst = step_ms(bench, lengths, 200)
        row |= {
            "case": f"{shape.name} {len(lengths)}x{lengths[0]}",
            "lone_step_ms": middle,
            "lone_step_worst_ms": worst,
        }
        found.append(row)
        print(
            f"   {row['case']} pdl {enabled!s:5}: gpu {gpu:.3f} ms, graph launch {row['replay_us']:.0f} us, "
            f"step launch {row['launch_us']:.0f} us; {row['step_ms']:.3f} ms a queued step, {middle:.3f} a lone one"
        )
        bench.close()
    use_pdl(True)
    return found


def measure_first_requests(shape: Shape) -> dict[str, Any]:
    """Lone steps of a mix of queries and small batches: the first 2,000 with lazy capture, with a list, and after."""
    random = np.random.default_rng(3)
    mix = [
        np.clip(np.exp(random.normal(4.2, 0.9, random.choice([1, 1, 1, 2, 4, 8]))), 4, 512).astype(int).tolist()
        for _ in range(4000)
    ]
    found: dict[str, Any] = {}
    with TemporaryDirectory() as directory:
        shapes = Path(directory) / "shapes.json"
        for capture in ("lazy", "list"):
            bench = Bench(shape, max_num_batched_tokens=8192, capture=capture, shapes=shapes)
            while bench.encoder.idle_work:
                bench.encoder.idle()
                bench.encoder.drain()
            for name, part in ((capture, mix[:2000]), (f"{capture}, after", mix[2000:])):
                times = []
                for lengths in part:
                    bench.fill(lengths)
                    started = time.perf_counter()
                    bench.run(lengths)
                    times.append((time.perf_counter() - started) * 1e3)
                times.sort()
                found[name] = {"p50_ms": times[1000], "p99_ms": times[1979], "max_ms": times[-1]}
                found[name] |= {key: bench.encoder.figures()[key] for key in ("graphs", "graph_memory_bytes")}
                row = found[name]
                print(
                    f"   {name:12} p50 {row['p50_ms']:.2f} p99 {row['p99_ms']:.2f} max {row['max_ms']:.1f} ms, "
                    f"{row['graphs']} graphs, {row['graph_memory_bytes'] / 2**20:.0f} MiB"
                )
            bench.close()
    return found


def measure_crossover(shape: Shape) -> dict[str, float]:
    """What a server measures at its start."""
    started = time.perf_counter()
    bench = Bench(shape, max_num_batched_tokens=16384, max_graph_tokens=None)
    seconds = time.perf_counter() - started
    figures = bench.encoder.figures()
    bench.close()
    print(f"   crossover {figures['graph_max_tokens']:.0f} tokens; made in {seconds:.1f} s")
    return {"max_graph_tokens": figures["graph_max_tokens"], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for encoder_graph.json")
    parser.add_argument("--quick", action="store_true", help="fewer cases, for a first look")
    parser.add_argument("--only", choices=("shapes", "gaps", "launch", "curve"), help="one part")
    options = parser.parse_args()
    large = LARGE[:4] if options.quick else LARGE
    document: dict[str, Any] = {"versions": versions()}
    parts = (options.only,) if options.only else ("shapes", "gaps", "launch", "curve")
    with torch.inference_mode():
        for part in parts:
            match part:
                case "shapes":
                    profiled = [(1, 128), (1, 512), large[-1]]
                    for name in ("pplx-embed-0.6b", "qwen3-embedding-0.6b"):
                        document[name] = measure_shape(SHAPES[name], large, profiled)
                    for name in ("minilm-l6", "bge-small"):
                        document[name] = measure_shape(SHAPES[name], SMALL, [(1, 32)])
                case "gaps":
                    document["gaps"] = measure_gaps(SHAPES["pplx-embed-0.6b"])
                case "launch":
                    document["launch"] = [
                        *measure_launch(SHAPES["pplx-embed-0.6b"], [128]),
                        *measure_launch(SHAPES["minilm-l6"], [32]),
                    ]
                    document["first_requests"] = measure_first_requests(SHAPES["qwen3-embedding-0.6b"])
                    document["crossover"] = {name: measure_crossover(SHAPES[name]) for name in SHAPES}
                case "curve":
                    names = ("qwen3-embedding-0.6b",) if options.quick else ("qwen3-embedding-0.6b", "minilm-l6")
                    for name in names:
                        document[f"curve {name}"] = measure_curve(SHAPES[name], 0.5 if options.quick else 1.0)
            save(options.out, "encoder_graph.json", document)


if __name__ == "__main__":
    main()
