"""Compiles the Triton kernels of encoders and of products of few rows for Hopper on a machine without a GPU:
registers, spills, shared memory. Generation's: decode_compile.py.

    python -m bench.micro.compile_kernels [FILTER] [--shard I/N]

Also fills Triton's cache before a measurement, N processes at a time. Runs the kernels' own Python entry points on CPU
tensors of the real shapes; launches are replaced by compilation.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.runtime.jit import JITFunction

from bench.micro.variants import PARTS, PLAIN_BLOCKS, TILED_BLOCKS, attention_tiles, rope_tiles
from rose.kernels.activation import gelu, silu_mul
from rose.kernels.contain import contain
from rose.kernels.embedding import embed, embed_layer_norm, embed_part, embed_rms_norm
from rose.kernels.few_rows import few_rows_product
from rose.kernels.norm import add_layer_norm, add_rms_norm
from rose.kernels.pooling import Defaults, pool_rows
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.kernels.ragged_attention import Rope, Tiles, ragged_attention

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 232_448  # of a program there
BF16 = torch.bfloat16


class NoDriver:
    """As much of a driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def is_active() -> bool:
        return True


def compile_only(found: list[tuple[str, Any]]) -> None:
    """Launches compile and append (kernel, result) to `found` from now on."""
    triton.runtime.driver.set_active(NoDriver())
    run = JITFunction.run

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = warm  # type: ignore[method-assign]
    launch_pdl = {"PDL": True, "launch_pdl": True}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("rose.kernels") and hasattr(module, "pdl"):
            module.pdl = lambda tensor: dict(launch_pdl)  # type: ignore[attr-defined]
        if getattr(module, "__name__", "").startswith("rose.kernels") and hasattr(module, "stages_that_fit"):
            module.stages_that_fit = _stages_that_fit  # type: ignore[attr-defined]


def _stages_that_fit(num_stages: int, stage_bytes: int, tensor: torch.Tensor, other_bytes: int = 0) -> int:
    return max(1, min(num_stages, (SHARED_BYTES - other_bytes) // stage_bytes))


def usage(cubin: bytes) -> str:
    """What the assembler says of a kernel: registers, stack (spills), shared memory."""
    tool = Path(nvidia_driver.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    local = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    hgmma, hmma = len(re.findall("HGMMA", sass)), len(re.findall(r"\bHMMA", sass))
    wide = len(re.findall(r"(?:LDG|LDGSTS)\.E\.(?:\w+\.)*128", sass))
    return f"reg {numbers['REG']:3d} stack {numbers['STACK']:4d} spill ops {local:3d} " \
           f"wgmma {hgmma:3d} mma {hmma:3d} 16-byte loads {wide:3d}"  # fmt: skip


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield from row_cases()
    yield from few_rows_cases()
    yield from pooling_cases()
    yield from attention_cases()


def few_rows_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    weight, norm = zeros(2 * 1024, 2048), (zeros(2048), 1e-5)
    for block in (*TILED_BLOCKS, *PLAIN_BLOCKS):
        for num_rows in (5,) if block.tiled else (1, 2):
            x, rows, name = zeros(num_rows, 2048), zeros(num_rows, 2048), f"few rows {num_rows} {block[:5]}"
            call = partial(few_rows_product, x, weight, block=block)
            for along in (None,) if block.tiled else (None, norm):
                yield f"{name} gated", partial(call, norm=along, gated=True)
                yield f"{name} alone", partial(call, norm=along)
            yield f"{name} add", partial(call, residual=rows)


def row_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    z, tokens, ids = zeros, 128, zeros(128, dtype=torch.int32)
    h, i = 1024, 3072
    for width in (384, 1024):
        yield f"add_rms_norm {width}", lambda w=width: add_rms_norm(z(tokens, w), z(tokens, w), z(w), 1e-6)
        yield (
            f"add_layer_norm {width}",
            lambda w=width: add_layer_norm(z(tokens, w), z(tokens, w), z(w), z(w), 1e-6, x_bias=z(w)),
        )
        yield (
            f"embed_layer_norm {width}",
            lambda w=width: embed_layer_norm(
                ids, ids, ids, word=z(99, w), position=z(99, w), token_type=z(2, w), weight=z(w), bias=z(w), eps=1e-6
            ),
        )
    for parts in PARTS:
        yield (
            f"add_rms_norm {h} of {parts} parts",
            lambda p=parts: add_rms_norm(z(p, tokens, h), z(tokens, h), z(h), 1e-6),
        )
    yield "silu_mul", lambda: silu_mul(z(tokens, 2 * i))
    yield "gelu", lambda: gelu(z(tokens, 1536), z(1536))
    yield "embed", lambda: embed(ids, z(99, h))
    yield "embed_part", lambda: embed_part(ids, z(99, h), begin=0, num_words=99, out=z(len(ids), h))
    yield "embed_rms_norm", lambda: embed_rms_norm(ids, z(99, h), z(h), 1e-6)
    table = z(99, 64, dtype=torch.float32)
    yield (
        "qk_norm_rope",
        lambda: qk_norm_rope(
            z(tokens, 4096), z(128), z(128), ids, table, table, num_heads=16, num_kv_heads=8, head_dim=128
        ),
    )


def pooling_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    def pool(num_tokens: int) -> None:
        pool_rows(
            zeros(num_tokens, 1024), zeros(9, dtype=torch.int32), zeros(8, 8, dtype=torch.int32),
            zeros(8, dtype=torch.int32), zeros(32768, dtype=torch.uint8), Defaults("mean", True, True),
        )  # fmt: skip

    for num_tokens in (32, 4096):
        yield f"pool_rows {num_tokens}", lambda t=num_tokens: pool(t)


def attention_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    def attend(d: int, heads: int, kv: int, causal: bool, tiles: Tiles, rope: Rope | None = None) -> None:
        qkv = zeros(128, (heads + 2 * kv) * d)
        q, k, v = (p.unflatten(-1, (-1, d)) for p in qkv.split([heads * d, kv * d, kv * d], dim=-1))
        cu_seqlens = zeros(9, dtype=torch.int32)
        ragged_attention(q, k, v, cu_seqlens, scale=1.0, causal=causal, tiles=tiles, rope=rope)

    for d, heads, kv in ((32, 12, 12), (64, 16, 16), (128, 16, 8)):
        for tiles in dict.fromkeys([*attention_tiles(d, 32), *attention_tiles(d, 512)]):
            for causal in (False, True) if d == 128 else (False,):
                yield (
                    f"attention d{d} {tuple(tiles)} causal={causal}",
                    lambda a=(d, heads, kv, causal, tiles): attend(*a),
                )
    for heads, d in ((12, 32), (16, 64), (8, 128)):
        kv = zeros(64, 2, heads, d)
        yield f"contain {heads} x {d}", lambda x=kv: contain(x[:, 0], x[:, 1], zeros(9, dtype=torch.int32))
    table = zeros(99, 64, dtype=torch.float32)
    for tiles in [*rope_tiles(32), *rope_tiles(128)]:
        rope = Rope(zeros(128), zeros(128), table, table, 1e-6)
        yield f"attention+rope {tuple(tiles)}", lambda t=tiles, r=rope: attend(128, 16, 8, False, t, r)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("filter", nargs="?", default="")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th case from the I-th on")
    args = parser.parse_args()
    shard, num_shards = map(int, args.shard.split("/"))
    found: list[tuple[str, Any]] = []
    compile_only(found)
    failed = False
    for index, (name, run) in enumerate(cases()):
        if args.filter not in name or index % num_shards != shard:
            continue
        try:
            run()
        except Exception as error:  # noqa: BLE001 - one kernel's failure must not hide the others
            print(f"{name:48s} FAILED {type(error).__name__}: {str(error)[-300:]}", flush=True)
            failed = True
        for kernel, compiled in found:
            print(
                f"{name:48s} {kernel:26s} {usage(compiled.asm['cubin'])} shared {compiled.metadata.shared}", flush=True
            )
        found.clear()
    sys.exit(failed)


if __name__ == "__main__":
    main()
