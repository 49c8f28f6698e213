"""Our kernels against FlashInfer's and torch's on a GPU: error against float32, microseconds, distance to the floor.

    python -m bench.micro.kernels [--out DIR] [--only NAME]

Each variant is first compared with float32 torch, then timed by graph replay over rotated buffers. The floor is bytes
that must move over 4.3 TB/s (or operations over 790 TFLOP/s). Skinny products rotate through 28 layers' weights, as
a model does.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro.cases import DEVICE, Build, Case, random, simple, weights
from bench.micro.gpu_timing import (
    BYTES_PER_S,
    FLOP_PER_S,
    attempt,
    graph_us,
    num_copies,
    save,
    versions,
    warm_cache,
)
from bench.micro.products import gemm_cases
from ipc.step import DTYPE_CODES
from rose.kernels.activation import gelu, silu_mul
from rose.kernels.embedding import embed, embed_layer_norm, embed_rms_norm
from rose.kernels.launch import use_pdl
from rose.kernels.norm import add_layer_norm, add_rms_norm
from rose.kernels.pooling import Defaults, pool_rows
from rose.kernels.qk_norm_rope import qk_norm_rope

TOKENS = (128, 512, 4096, 12800)
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1024, 3072, 16, 8, 128, 151_936


def norm_cases(tokens: int) -> Iterator[Case]:
    def make() -> tuple[Any, ...]:
        return random(tokens, HIDDEN), random(tokens, HIDDEN), weights(HIDDEN)

    def want(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float() + residual.float(), (HIDDEN,), weight.float(), 1e-6)

    def flashinfer(x: Tensor, residual: Tensor, weight: Tensor) -> None:
        import flashinfer

        flashinfer.fused_add_rmsnorm(x, residual, weight, 1e-6)

    variants = {
        "triton": simple(lambda x, r, w: add_rms_norm(x, r, w, 1e-6, out=x), make, want),
        "flashinfer": simple(flashinfer, make, want),
        "torch": simple(lambda x, r, w: F.rms_norm(r.add_(x), (HIDDEN,), w, 1e-6), make, want),
    }
    yield Case(f"add_rms_norm {HIDDEN} T={tokens}", 4 * 2 * tokens * HIDDEN, 0, variants)
    for width in (384, 1024):

        def make_ln(w: int = width) -> tuple[Any, ...]:
            return random(tokens, w), random(tokens, w), weights(w), random(w), random(w)

        def want_ln(x: Tensor, r: Tensor, w: Tensor, b: Tensor, xb: Tensor) -> Tensor:
            return F.layer_norm(x.float() + xb.float() + r.float(), w.shape, w.float(), b.float(), 1e-12)

        variants = {
            "triton": simple(
                lambda x, r, w, b, xb: add_layer_norm(x, r, w, b, 1e-12, x_bias=xb, out=x), make_ln, want_ln
            ),
            "torch": simple(
                lambda x, r, w, b, xb: F.layer_norm(x.add_(xb).add_(r), w.shape, w, b, 1e-12), make_ln, want_ln
            ),
        }  # fmt: skip
        yield Case(f"bias_add_layer_norm {width} T={tokens}", 3 * 2 * tokens * width, 0, variants)


def activation_cases(tokens: int) -> Iterator[Case]:
    def make() -> tuple[Any, ...]:
        return (random(tokens, 2 * INTERMEDIATE),)

    def want(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, -1)
        return F.silu(gate) * up

    def flashinfer(x: Tensor) -> Tensor:
        import flashinfer

        return flashinfer.silu_and_mul(x)

    variants = {"triton": simple(silu_mul, make, want), "flashinfer": simple(flashinfer, make, want)}
    yield Case(f"silu_mul {INTERMEDIATE} T={tokens}", 3 * 2 * tokens * INTERMEDIATE, 0, variants)
    for width in (1536, 4096):

        def make_gelu(w: int = width) -> tuple[Any, ...]:
            return random(tokens, w), random(w)

        def want_gelu(x: Tensor, b: Tensor) -> Tensor:
            return F.gelu(x.float() + b.float())

        variants = {
            "triton": simple(lambda x, b: gelu(x, b, out=x), make_gelu, want_gelu),
            "torch": simple(lambda x, b: F.gelu(x.add_(b)), make_gelu, want_gelu),
        }
        yield Case(f"bias_gelu {width} T={tokens}", 2 * 2 * tokens * width, 0, variants)


def rope_cases(tokens: int) -> Iterator[Case]:
    angles = torch.outer(
        torch.arange(8192, device=DEVICE).float(), 1e6 ** -(torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    )
    cos, sin = angles.cos(), angles.sin()
    width, turned = (HEADS + 2 * KV_HEADS) * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM
    positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32) % 512

    def make() -> tuple[Any, ...]:
        return random(tokens, width), weights(HEAD_DIM), weights(HEAD_DIM)

    def want(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        heads = qkv.float().unflatten(-1, (-1, HEAD_DIM))
        c, s = cos[positions][:, None], sin[positions][:, None]
        parts = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = (
            turned_by(F.rms_norm(x, (HEAD_DIM,), w.float(), 1e-6), c, s)
            for x, w in zip(parts, (q_weight, k_weight), strict=False)
        )
        return torch.cat([q, k, parts[2]], dim=1).flatten(1)

    def ours(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
        qk_norm_rope(
            qkv, q_weight, k_weight, positions, cos, sin, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )

    def flashinfer(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
        import flashinfer

        q, k = (
            qkv[:, : HEADS * HEAD_DIM].unflatten(-1, (-1, HEAD_DIM)),
            qkv[:, HEADS * HEAD_DIM : turned].unflatten(-1, (-1, HEAD_DIM)),
        )
        flashinfer.rmsnorm(q, q_weight, out=q)
        flashinfer.rmsnorm(k, k_weight, out=k)
        flashinfer.apply_rope_pos_ids_inplace(q, k, positions, rope_theta=1e6)

    variants = {"triton": simple(ours, make, want), "flashinfer (3 kernels)": simple(flashinfer, make, want)}
    yield Case(f"qk_norm_rope 16:8x128 T={tokens}", 2 * 2 * tokens * turned, 0, variants)


def turned_by(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def embedding_cases(tokens: int) -> Iterator[Case]:
    word, weight = random(VOCABULARY, HIDDEN), weights(HIDDEN)

    def make() -> tuple[Any, ...]:
        return (torch.randint(0, VOCABULARY, (tokens,), device=DEVICE, dtype=torch.int32),)

    def want(ids: Tensor) -> Tensor:
        return F.rms_norm(word[ids.long()].float(), (HIDDEN,), weight.float(), 1e-6)

    variants = {
        "triton": simple(lambda ids: embed_rms_norm(ids, word, weight, 1e-6)[1], make, want),
        "torch": simple(lambda ids: F.rms_norm(F.embedding(ids, word), (HIDDEN,), weight, 1e-6), make, want),
    }
    yield Case(f"embed_rms_norm {HIDDEN} T={tokens}", 3 * 2 * tokens * HIDDEN, 0, variants)
    variants = {
        "triton": simple(lambda ids: embed(ids, word), make, lambda ids: word[ids.long()]),
        "torch": simple(lambda ids: F.embedding(ids, word), make, lambda ids: word[ids.long()]),
    }
    yield Case(f"embed {HIDDEN} T={tokens}", 2 * 2 * tokens * HIDDEN, 0, variants)
    small, position, types, bias = word[:30_522, :384].contiguous(), random(512, 384), random(2, 384), random(384)
    positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32) % 512

    def make_bert() -> tuple[Any, ...]:
        return (torch.randint(0, 30_522, (tokens,), device=DEVICE, dtype=torch.int32),)

    def want_bert(ids: Tensor) -> Tensor:
        total = small[ids.long()].float() + position[positions.long()].float() + types[0].float()
        return F.layer_norm(total, (384,), weight[:384].float(), bias.float(), 1e-12)

    def ours(ids: Tensor) -> Tensor:
        return embed_layer_norm(
            ids, positions, None, word=small, position=position, token_type=types, weight=weight[:384], bias=bias,
            eps=1e-12,
        )  # fmt: skip

    def by_torch(ids: Tensor) -> Tensor:
        total = F.embedding(ids, small).add_(types[0]).add_(F.embedding(positions, position))
        return F.layer_norm(total, (384,), weight[:384], bias, 1e-12)

    variants = {"triton": simple(ours, make_bert, want_bert), "torch": simple(by_torch, make_bert, want_bert)}
    yield Case(f"embed_layer_norm 384 T={tokens}", 3 * 2 * tokens * 384, 0, variants)


def pooling_cases(tokens: int) -> Iterator[Case]:
    for num_seqs in sorted({1, max(1, tokens // 512)}):
        length = tokens // num_seqs
        cu_seqlens = torch.arange(0, tokens + 1, length, device=DEVICE, dtype=torch.int32)
        for pooling in ("mean", "last_token"):
            table = torch.full((num_seqs, 8), -1, dtype=torch.int32, device=DEVICE)
            table[:, 2] = DTYPE_CODES["float32"]
            table[:, 5] = torch.arange(num_seqs, device=DEVICE) * 4 * HIDDEN
            defaults = Defaults(pooling, True, False)

            def make(n: int = num_seqs) -> tuple[Any, ...]:
                return (
                    random(tokens, HIDDEN), torch.zeros(n, dtype=torch.int32, device=DEVICE),
                    torch.zeros(n * 4 * HIDDEN, dtype=torch.uint8, device=DEVICE),
                )  # fmt: skip

            def ours(
                x: Tensor, status: Tensor, values: Tensor,
                cu: Tensor = cu_seqlens, rows: Tensor = table, d: Defaults = defaults,
            ) -> Tensor:  # fmt: skip
                pool_rows(x, cu, rows, status, values, d)
                return values.view(torch.float32)

            def want(x: Tensor, status: Tensor, values: Tensor, p: str = pooling, n: int = num_seqs) -> Tensor:
                rows = x.view(n, -1, HIDDEN)
                vectors = rows.float().mean(1) if p == "mean" else rows[:, -1].float()
                return F.normalize(vectors, dim=-1).flatten()

            def by_torch(x: Tensor, status: Tensor, values: Tensor, p: str = pooling, n: int = num_seqs) -> Tensor:
                rows = x.view(n, -1, HIDDEN)
                vectors = rows.mean(1, dtype=torch.float32) if p == "mean" else rows[:, -1].float()
                return F.normalize(vectors, dim=-1).flatten()

            read = tokens if pooling == "mean" else num_seqs
            variants = {"triton": simple(ours, make, want), "torch (equal lengths)": simple(by_torch, make, want)}
            yield Case(f"pool {pooling} {num_seqs}x{length}", 2.0 * read * HIDDEN, 0, variants)


def measure(case: Case, build: Build, *, pdl: bool) -> dict[str, Any]:
    use_pdl(pdl)
    call, error = build()
    call()
    result = {"error_vs_fp32": error()}
    copies = case.copies or num_copies(case.num_bytes)
    calls = [call, *(build()[0] for _ in range(copies - 1))]
    floor_us = max(case.num_bytes / BYTES_PER_S, case.flops / FLOP_PER_S) * 1e6
    took = graph_us(calls)
    return {**result, "us": took, "floor_us": floor_us, "of_floor": took / floor_us, "copies": copies}


def cases() -> Iterator[Case]:
    for num_rows in (64, 128, 256, 512):
        yield from gemm_cases(num_rows)
    for tokens in TOKENS:
        for family in (norm_cases, activation_cases, rope_cases, embedding_cases, pooling_cases):
            yield from family(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for kernels.json")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-compile", action="store_true", help="the compiler's cache is filled already")
    parser.add_argument("--budget-s", type=float, default=110.0, help="cases not begun by then are skipped")
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    compile_s = 0.0 if args.no_compile else warm_cache("")
    print(f"compiled in {compile_s:.0f} s")
    records: list[dict[str, Any]] = []
    for case in cases():
        if args.only not in case.name:
            continue
        if time.perf_counter() - begin > args.budget_s:
            records.append({"case": case.name, "variant": "-", "error": "not begun: out of time"})
            continue
        for name, build in case.variants.items():
            for pdl in (True, False) if name == "triton" else (True,):
                label = name if pdl else f"{name}, no pdl"
                record = attempt(
                    {"case": case.name, "variant": label}, lambda c=case, b=build, p=pdl: measure(c, b, pdl=p)
                )
                records.append(record)
                print(line(record), flush=True)
        torch.cuda.empty_cache()
    use_pdl(True)
    save(args.out, "kernels.json", {**versions(), "compile_s": compile_s, "records": records})
    print("\n=== best per case ===")
    for name in dict.fromkeys(record["case"] for record in records):
        good = [r for r in records if r["case"] == name and r.get("error_vs_fp32", 1.0) < 2e-2]
        print(" ; ".join(f"{r['variant']} {r['us']:.2f}" for r in sorted(good, key=lambda r: r["us"])[:4]).join(
            (f"{name} (floor {good[0]['floor_us']:.2f} us): " if good else f"{name}: nothing right", "")))  # fmt: skip
    print(f"total {time.perf_counter() - begin:.0f} s")


def line(record: dict[str, Any]) -> str:
    head = f"{record['case']:36s} {record['variant']:28s}"
    if "error" in record:
        return f"{head} FAILED {record['error'][:140]}"
    floor = f"floor {record['floor_us']:8.2f}  x{record['of_floor']:.2f}"
    return f"{head} err {record['error_vs_fp32']:.1e}  {record['us']:8.2f} us  {floor}"


if __name__ == "__main__":
    main()
