"""One short text through 28 layers of the Qwen3-0.6B shape as one CUDA graph: which kernels make the least GPU time.

    python -m bench.micro.layer_chain [--out DIR]

Random weights, bidirectional, mean pooling. Each way is compared with float32 (cosine) and then timed by replay, with
programmatic dependent launch and without. Goal: 1.1 ms for 128 tokens; floor: the weights' bytes over 4.3 TB/s.
"""

import argparse
import math
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro.gpu_timing import BYTES_PER_S, attempt, graph_us, save, versions, warm_cache
from bench.micro.products import blas
from bench.micro.variants import rope_tiles
from ipc.step import DTYPE_CODES
from rose.attention.flashinfer_ragged import FlashInferBackend
from rose.attention.interface import AttentionShape
from rose.attention.triton_ragged import TritonAttention
from rose.kernels.activation import silu_mul
from rose.kernels.embedding import embed_rms_norm
from rose.kernels.launch import use_pdl
from rose.kernels.norm import add_rms_norm
from rose.kernels.pooling import Defaults, pool_rows
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.kernels.ragged_attention import Rope, ragged_attention
from rose.kernels.split_product import num_parts, split_product

DEVICE, BF16 = "cuda", torch.bfloat16
HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, LAYERS, VOCABULARY, EPS = 1024, 16, 8, 128, 3072, 28, 151_936, 1e-6
SHAPE = AttentionShape(HEADS, KV_HEADS, DIM, DIM**-0.5, False)
SIZES = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
TOKENS = (32, 128, 256, 512)


class Layer(NamedTuple):
    """Weights of one layer."""

    norm1: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor


class Way(NamedTuple):
    """How o and down are multiplied and added to the stream, who attends, and whose products."""

    product: str  # linear | addmm | split
    attention: str  # triton | rope (norm and rotation in flight) | fa2 | fa3
    library: str = "cublas"


WAYS = {
    "linear, fa3": Way("linear", "fa3"),
    "linear, triton": Way("linear", "triton"),
    "linear by cublaslt, triton": Way("linear", "triton", "cublaslt"),
    "addmm, triton": Way("addmm", "triton"),
    "split, triton": Way("split", "triton"),
    "split, triton with rope": Way("split", "rope"),
}


def make_layers() -> list[Layer]:
    def matrix(*shape: int) -> Tensor:
        return torch.empty(*shape, device=DEVICE, dtype=BF16).normal_(0, 0.02)

    def ones(n: int) -> Tensor:
        return (1 + 0.1 * torch.randn(n, device=DEVICE)).to(BF16)

    def layer() -> Layer:
        return Layer(
            ones(HIDDEN), matrix(sum(SIZES), HIDDEN), ones(DIM), ones(DIM), matrix(HIDDEN, SIZES[0]),
            ones(HIDDEN), matrix(2 * INTERMEDIATE, HIDDEN), matrix(HIDDEN, INTERMEDIATE),
        )  # fmt: skip

    return [layer() for _ in range(LAYERS)]


class Model:
    """The forward pass of one text of T tokens, in several ways."""

    def __init__(self, num_tokens: int, layers: list[Layer], word: Tensor) -> None:
        self.layers, self.word = layers, word
        self.last_norm = (1 + 0.1 * torch.randn(HIDDEN, device=DEVICE)).to(BF16)
        self.ids = torch.randint(0, len(word), (num_tokens,), device=DEVICE, dtype=torch.int32)
        self.positions = torch.arange(num_tokens, device=DEVICE, dtype=torch.int32)
        self.cu_seqlens = torch.tensor([0, num_tokens], device=DEVICE, dtype=torch.int32)
        frequencies = 1e6 ** -(torch.arange(0, DIM, 2, device=DEVICE) / DIM)
        angles = torch.outer(torch.arange(1024, device=DEVICE).float(), frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.table = torch.full((1, 8), -1, dtype=torch.int32, device=DEVICE)
        self.table[0, 2], self.table[0, 5] = DTYPE_CODES["float32"], 0
        self.status = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.values = torch.zeros(4 * HIDDEN, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()

    def forward(self, way: Way, attend: Any) -> Tensor:
        x, normed = embed_rms_norm(self.ids, self.word, self.layers[0].norm1, EPS)
        norms = [*(w.norm1 for w in self.layers[1:]), self.last_norm]
        for w, next_norm in zip(self.layers, norms, strict=True):
            heads = self.attention(way, attend, F.linear(normed, w.qkv), w).flatten(1)
            normed = add_product(way, x, heads, w.o, w.norm2)
            normed = add_product(way, x, silu_mul(F.linear(normed, w.gate_up)), w.down, next_norm)
        pool_rows(normed, self.cu_seqlens, self.table, self.status, self.values, Defaults("mean", False, False))
        return self.values.view(torch.float32)

    def attention(self, way: Way, attend: Any, qkv: Tensor, w: Layer) -> Tensor:
        if way.attention != "rope":
            qk_norm_rope(
                qkv, w.q_norm, w.k_norm, self.positions, self.cos, self.sin,
                num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, eps=EPS,
            )  # fmt: skip
        q, k, v = (part.unflatten(-1, (-1, DIM)) for part in qkv.split(SIZES, dim=-1))
        if way.attention != "rope":
            return attend(q, k, v, SHAPE)
        rope = Rope(w.q_norm, w.k_norm, self.cos, self.sin, EPS)
        return ragged_attention(
            q, k, v, self.cu_seqlens, scale=SHAPE.scale, causal=False, rope=rope, tiles=rope_tiles(len(qkv))[0]
        )

    def reference(self) -> Tensor:
        """Float32 throughout."""

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, weight.shape, weight.float(), EPS)

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            c, s = self.cos[self.positions][:, None], self.sin[self.positions][:, None]
            return torch.cat((first * c - second * s, second * c + first * s), -1)

        x = self.word[self.ids.long()].float()
        for w in self.layers:
            parts = (norm(x, w.norm1) @ w.qkv.float().T).split(SIZES, dim=-1)
            q, k, v = (part.unflatten(-1, (-1, DIM)) for part in parts)
            q, k = turn(norm(q, w.q_norm)), turn(norm(k, w.k_norm))
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
            x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w.o.float().T
            gate, up = (norm(x, w.norm2) @ w.gate_up.float().T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ w.down.float().T
        return norm(x, self.last_norm).mean(0)


def add_product(way: Way, x: Tensor, rows: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    """x += rows · weightᵀ in place; returns x normalised."""
    if way.product == "addmm":
        return add_rms_norm(x.addmm_(rows, weight.t()), None, norm, EPS)
    parts = num_parts(len(rows), len(weight), rows.shape[1]) if way.product == "split" else 1
    return add_rms_norm(F.linear(rows, weight) if parts == 1 else split_product(rows, weight, parts), x, norm, EPS)


def measure(model: Model, way: Way, expected: Tensor, *, pdl: bool) -> dict[str, Any]:
    use_pdl(pdl)
    attend: Any = TritonAttention(model.cu_seqlens)
    if way.attention in ("fa2", "fa3"):
        backend = FlashInferBackend(way.attention, DEVICE, BF16)  # type: ignore[arg-type]
        attend = backend.static(model.cu_seqlens, len(model.ids), SHAPE)
        attend.prepare([0, len(model.ids)])
    model.values.zero_()
    torch.cuda.synchronize()
    with blas(way.library):
        got = model.forward(way, attend)
        cosine = F.cosine_similarity(got, expected, dim=0).item()
        return {"cosine": cosine, "ms": graph_us([lambda: model.forward(way, attend)], replays=21) / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for layer_chain.json")
    parser.add_argument("--no-compile", action="store_true", help="the compiler's cache is filled already")
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    if not args.no_compile:
        warm_cache("")
    layers, word = make_layers(), torch.randn(VOCABULARY, HIDDEN, device=DEVICE).to(BF16)
    num_bytes = 2 * sum(t.numel() for w in layers for t in (w.qkv, w.o, w.gate_up, w.down))
    floor_ms = num_bytes / BYTES_PER_S * 1e3
    records: list[dict[str, Any]] = []
    for num_tokens in TOKENS:
        model = Model(num_tokens, layers, word)
        expected = model.reference()
        for name, way in WAYS.items():
            for pdl in (True, False):
                record = {
                    "case": f"1x{num_tokens}",
                    "variant": name if pdl else f"{name}, no pdl",
                    "floor_ms": floor_ms,
                }
                records.append(
                    attempt(record, lambda m=model, w=way, e=expected, p=pdl: measure(m, w, e, pdl=p))  # type: ignore[misc]
                )
                print(line(record), flush=True)
        save(args.out, "layer_chain.json", {**versions(), "records": records})
    use_pdl(True)
    print("\n=== fastest ===")
    for case in dict.fromkeys(record["case"] for record in records):
        right = [r for r in records if r["case"] == case and r.get("cosine", 0) > 0.999]
        fastest = sorted(right, key=lambda r: r["ms"])[:4]
        print(f"{case} (floor {floor_ms:.3f} ms): " + "; ".join(f"{r['variant']} {r['ms']:.3f}" for r in fastest))
    print(f"total {time.perf_counter() - begin:.0f} s")


def line(record: dict[str, Any]) -> str:
    head = f"{record['case']:8s} {record['variant']:36s}"
    if "error" in record:
        return f"{head} FAILED {record['error'][:160]}"
    return f"{head} cosine {record['cosine']:.6f} {record['ms']:.3f} ms (floor {record['floor_ms']:.3f})"


if __name__ == "__main__":
    main()
