"""A Llama-8B-shaped decode step on a GPU, as the server runs it: correctness first, then what it costs and where.

    python -m bench.micro.decode_step [--out DIR] [--only PART,PART] [--point FILTER] [--budget-s 270]

Parts, in this order: correct, step, gaps, profile, prefill, products, attention.

Random weights made on the device, bfloat16, 512 tokens of context. Floor: all weights but the embedding, and the keys
and values, over 4.3 TB/s. What is expected to make up a step: the matrix products by far (4.06 ms of it, measured alone
at one row), attention 32 times (4 us a layer at one row to 35 at 128), appending, norms and rotation some 0.2 ms,
logits and sampling 0.1 ms. One part that fails does not end the others.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.micro import decode_attention, decode_gaps, decode_products
from bench.micro.gpu_timing import BYTES_PER_S, FLOP_PER_S, attempt, save, versions
from bench.micro.random_decoders import BF16, GREEDY, Pass, Seated, llama_8b, random_model
from ipc.types import SamplingParams
from rose.attention.paged_reference import ReferencePagedBackend
from rose.attention.paged_triton import TritonPagedBackend
from rose.kernels.launch import use_pdl
from rose.layers.kernel_layers import use_kernels

ROWS = (1, 8, 32, 128)
CONTEXT = 512
PLAIN_MS = {1: 4.74, 8: 5.06, 32: 5.60, 128: 7.93}  # the best plain graph of library kernels measured before
PEER_PROMPT_MS = {512: 14.9, 8192: 211.0}  # to its first token
PEER_MS = {1: 4.961, 8: 5.120, 32: 5.817, 128: 8.377}  # vLLM 0.22.0, time per output token
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1)
PARTS = ("correct", "step", "gaps", "profile", "prefill", "products", "attention")  # what may fault comes last
NUM_QUEUED = 100

Left = Callable[[], float]


def floor_ms(num_rows: int) -> float:
    config = llama_8b()
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    keys = num_rows * CONTEXT * 2 * kv * config.num_hidden_layers
    return 2 * (weights + keys) / BYTES_PER_S * 1e3


# --- correctness --------------------------------------------------------------------------------------------


def correct() -> dict[str, Any]:
    """Two layers: logits against float32; graphs against none; two steps in flight against one."""
    config = llama_8b(2)
    model, exact = random_model(config), random_model(config).float()
    use_kernels(model)
    torch.manual_seed(0)
    ids = [torch.randint(0, config.vocab_size, (600,)) for _ in range(3)]
    passes = (
        Pass(config, model, TritonPagedBackend(), BF16),
        Pass(config, exact, ReferencePagedBackend(), torch.float32),
    )
    starts, errors = [0] * 3, []
    for lengths in ([37, 512, 130], [1] * 3, [5] * 3, [1, 40, 1]):
        rows = [x[s : s + n] for x, s, n in zip(ids, starts, lengths, strict=True)]
        got, expected = (one.logits(rows, starts) for one in passes)
        errors.append(((got - expected).norm() / expected.norm()).item())
        starts = [s + n for s, n in zip(starts, lengths, strict=True)]
    found: dict[str, Any] = {"logits_error": errors}
    tokens = []
    for settings, in_flight in (({"capture": "off"}, 1), ({}, 1), ({}, 2)):
        bench = Seated(config, random_model(config), num_seqs=12, context=300, room=100, params=DRAWN, **settings)
        bench.seat([300, 1, 17, 299, 64, 65, 128, 2, 250, 33, 16, 15])
        tokens.append(bench.tokens(12, 20, in_flight=in_flight))
        bench.close()
    found["graphs_equal_none"], found["two_in_flight_equal_one"] = tokens[1] == tokens[0], tokens[2] == tokens[0]
    print(f"   {found}")
    assert max(errors) < 2e-2, f"logits differ from float32's: {errors}"
    assert found["graphs_equal_none"], "graphs give other tokens than launches"
    assert found["two_in_flight_equal_one"], "two steps in flight give other tokens than one"
    return found


# --- the whole step -----------------------------------------------------------------------------------------


def replay_ms(bench: Seated, num_rows: int, replays: int = 21) -> float:
    """Median of a captured step's replays, two warm-ups before. Each is a step, the middle one behind CONTEXT."""
    bench.seat([CONTEXT - 6 - replays // 2] * bench.facts.max_num_seqs)
    bench.tokens(num_rows, 4)
    needs = bench.decoder.residents.sampler.needs(list(range(num_rows)))
    graph = bench.decoder.graphs.graph(bench.decoder.key(num_rows, needs))
    assert graph is not None, f"the step of {num_rows} rows was not captured"
    for _ in range(2):
        graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def queued_ms(bench: Seated, num_rows: int) -> dict[str, float]:
    """Steps as a scheduler sends them, two in flight, CONTEXT behind them on average: wall time of each, what of it the
    launch took the host."""
    bench.seat([CONTEXT - 4 - NUM_QUEUED // 2] * bench.facts.max_num_seqs)
    bench.tokens(num_rows, 4, in_flight=2)
    launching: list[float] = []
    pending, started = [], time.perf_counter()
    for step in range(NUM_QUEUED):
        before = time.perf_counter()
        pending.append(bench.launch(num_rows, step % bench.ring.layout.num_slots)[0])
        launching.append(time.perf_counter() - before)
        if len(pending) == 2:
            oldest = pending.pop(0)
            while not oldest.ready():
                pass
    while not pending[0].ready():
        pass
    wall_ms = (time.perf_counter() - started) * 1e3 / NUM_QUEUED
    return {"queued_ms": wall_ms, "launch_us": statistics.median(launching) * 1e6}


@cache
def whole_model() -> nn.Module:
    model = random_model(llama_8b())
    use_kernels(model)
    return model


def step(left: Left) -> list[dict[str, Any]]:
    bench = Seated(llama_8b(), whole_model(), num_seqs=max(ROWS), context=CONTEXT, room=512)
    records = []
    for params, name in ((GREEDY, "greedy"), (DRAWN, "drawn")):
        bench.params = params
        for num_rows in ROWS:
            record: dict[str, Any] = {"rows": num_rows, "sampling": name, "floor_ms": floor_ms(num_rows)}
            record |= {"plain_ms": PLAIN_MS[num_rows], "peer_ms": PEER_MS[num_rows]}
            if left() <= 0:
                records.append(record | {"error": "not begun: out of time"})
                continue
            records.append(
                attempt(record, lambda n=num_rows: {"gpu_ms": replay_ms(bench, n), **queued_ms(bench, n)})  # type: ignore[misc]
            )
            print(step_line(records[-1]), flush=True)
    figures = bench.decoder.figures()
    print(f"   {figures['graphs']} graphs, {figures['graph_memory_bytes'] / 2**20:.0f} MiB, longest capture "
          f"{figures['graph_longest_capture_seconds'] * 1e3:.0f} ms")  # fmt: skip
    bench.close()
    return records


def step_line(record: dict[str, Any]) -> str:
    head = f"{record['rows']:4d} rows {record['sampling']:7s}"
    if "error" in record:
        return f"{head} FAILED {record['error'][:200]}"
    times = record["gpu_ms"] / record["floor_ms"]
    return (
        f"{head} gpu {record['gpu_ms']:6.3f} ms  floor {record['floor_ms']:.3f}  x{times:.2f}  plain graph "
        f"{record['plain_ms']:.2f}  queued {record['queued_ms']:6.3f}  launch {record['launch_us']:4.0f} us  "
        f"vLLM {record['peer_ms']:.2f}"
    )


# --- where it goes ------------------------------------------------------------------------------------------


def gaps(left: Left) -> list[dict[str, Any]]:
    bench = Seated(llama_8b(), whole_model(), num_seqs=max(ROWS), context=CONTEXT, room=256)
    records = decode_gaps.measure(bench, ROWS, left)
    bench.close()
    return records


def kernels(left: Left) -> dict[str, Any]:
    """Of one replay: kernels by name, their number and microseconds; the same step without dependent launch."""
    found: dict[str, Any] = {}
    for enabled in (True, False):
        use_pdl(enabled)
        bench = Seated(llama_8b(), whole_model(), num_seqs=128, context=CONTEXT, room=256)
        for num_rows in (1, 32, 128):
            if left() <= 0:
                break
            milliseconds = replay_ms(bench, num_rows)
            print(f"   {num_rows} rows, dependent launch {enabled}: {milliseconds:.3f} ms")
            found[f"{num_rows} rows, pdl {enabled}"] = {"gpu_ms": milliseconds}
            if enabled:
                found[f"{num_rows} rows, pdl {enabled}"]["kernels"] = by_kernel(bench, num_rows)
        bench.close()
        del bench
        torch.cuda.empty_cache()
    use_pdl(True)
    return found


def by_kernel(bench: Seated, num_rows: int) -> list[tuple[str, int, int]]:
    bench.tokens(num_rows, 2)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        bench.tokens(num_rows, 1)
        torch.cuda.synchronize()
    count: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in trace.events():
        if event.device_type.name == "CUDA":
            count[event.name[:60]] += 1
            microseconds[event.name[:60]] += event.device_time
    top = [(name, count[name], round(total)) for name, total in microseconds.most_common(16)]
    print(f"   {num_rows} rows: {sum(count.values())} kernels and copies, {sum(microseconds.values()):.0f} us")
    for name, times, total in top:
        print(f"      {times:4d} x {name:60s} {total:6d} us")
    return top


def prefill(left: Left) -> list[dict[str, Any]]:
    """A whole prompt as one step, from launch to token: small ones are graphs, the others launched kernel by kernel."""
    bench = Seated(llama_8b(), whole_model(), num_seqs=1, context=1, room=8192)
    records = []
    for num_tokens in (128, 512, 1024, 2048, 8192):
        if left() <= 0:
            break
        times, launching = [], []
        for _ in range(5):
            bench.seat()
            started = time.perf_counter()
            lazy = bench.prompt(num_tokens)
            launching.append((time.perf_counter() - started) * 1e3)
            while not lazy.ready():
                pass
            times.append((time.perf_counter() - started) * 1e3)
        record = {
            "tokens": num_tokens,
            "ms": min(times),
            "launch_ms": min(launching),
            "floor_ms": prompt_ms(num_tokens),
        }
        record |= {"peer_ms": PEER_PROMPT_MS.get(num_tokens)}
        records.append(record)
        print(f"   {prompt_line(record)}", flush=True)
    bench.close()
    return records


def prompt_ms(num_tokens: int) -> float:
    """The products and causal attention of a prompt at the peak rate."""
    config = llama_8b()
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    flops = config.num_hidden_layers * num_tokens * (2.0 * layer + 2.0 * num_tokens * heads)
    return flops / FLOP_PER_S * 1e3


def prompt_line(record: dict[str, Any]) -> str:
    return (
        f"prompt of {record['tokens']:5d}: {record['ms']:6.1f} ms, launched in {record['launch_ms']:.1f}  "
        f"floor {record['floor_ms']:.1f}  vLLM {record['peer_ms']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for decode_step.json")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--point", default="", help="attention: points whose name contains this")
    parser.add_argument("--budget-s", type=float, default=270.0, help="what has not begun by then is left out")
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    document: dict[str, Any] = versions()

    def left() -> float:
        return args.budget_s - (time.perf_counter() - begin)

    wanted = args.only.split(",")
    runs: dict[str, Callable[[], Any]] = {
        "correct": correct,
        "step": lambda: step(left),
        "gaps": lambda: gaps(left),
        "profile": lambda: kernels(left),
        "prefill": lambda: prefill(left),
        "products": lambda: decode_products.measure(left),
        "attention": lambda: decode_attention.measure(args.point, left),
    }
    for part in PARTS:
        if part not in wanted or left() <= 0:
            continue
        print(f"--- {part} ({time.perf_counter() - begin:.0f} s)", flush=True)
        document[part] = attempt({}, lambda run=runs[part]: {"result": run()})  # type: ignore[misc]
        if "error" in document[part]:
            print(f"   FAILED {document[part]['error']}")
        save(args.out, "decode_step.json", document)
        torch.cuda.empty_cache()
    print("\n=== summary ===")
    for name in wanted:
        print(f"{name}: {document.get(name, {}).get('error', 'done')}")
    for record in document.get("step", {}).get("result", []):
        print(step_line(record))
    for record in document.get("gaps", {}).get("result", []):
        print(decode_gaps.gap_line(record))
    for line in decode_attention.summary(document.get("attention", {}).get("result", [])):
        print(line)
    for record in document.get("prefill", {}).get("result", []):
        print(prompt_line(record))
    print(f"total {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
