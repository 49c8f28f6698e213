"""Compiles every Triton kernel for Hopper on a machine without a GPU: registers, spills, shared memory.

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
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.runtime.jit import JITFunction

from bench.micro.variants import GEMMS, ROPE_TILES, attention_tiles, gemm_tiles
from rose.kernels.activation import gelu, silu_mul
from rose.kernels.embedding import embed, embed_layer_norm, embed_rms_norm
from rose.kernels.norm import add_layer_norm, add_rms_norm
from rose.kernels.pooling import Defaults, pool_rows
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.kernels.ragged_attention import Rope, ragged_attention
from rose.kernels.skinny_gemm import Workspace, skinny_gemm

TARGET = GPUTarget("cuda", 90, 32)
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


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    def z(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    tokens, ids = 128, z(128, dtype=torch.int32)
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
    yield "silu_mul", lambda: silu_mul(z(tokens, 2 * i))
    yield "gelu", lambda: gelu(z(tokens, 1536), z(1536))
    yield "embed", lambda: embed(ids, z(99, h))
    yield "embed_rms_norm", lambda: embed_rms_norm(ids, z(99, h), z(h), 1e-6)
    table = z(99, 64, dtype=torch.float32)
    yield (
        "qk_norm_rope",
        lambda: qk_norm_rope(
            z(tokens, 4096), z(128), z(128), ids, table, table, num_heads=16, num_kv_heads=8, head_dim=128
        ),
    )
    defaults = Defaults("mean", True, True)
    for num_tokens in (128, 4096):
        yield (
            f"pool_rows {num_tokens}",
            lambda t=num_tokens: pool_rows(
                z(t, h), z(9, dtype=torch.int32), z(8, 8, dtype=torch.int32), z(8, dtype=torch.int32),
                z(32768, dtype=torch.uint8), defaults,
            ),
        )  # fmt: skip
    cu = z(9, dtype=torch.int32)
    for d, heads, kv in ((32, 12, 12), (64, 16, 16), (128, 16, 8)):
        for tiles in attention_tiles(d):
            for causal in (False, True):
                qkv = z(tokens, (heads + 2 * kv) * d)
                q, k, v = (p.unflatten(-1, (-1, d)) for p in qkv.split([heads * d, kv * d, kv * d], dim=-1))
                yield (
                    f"attention d{d} {tuple(tiles)} causal={causal}",
                    lambda q=q, k=k, v=v, c=causal, t=tiles: ragged_attention(
                        q, k, v, cu, scale=1.0, causal=c, tiles=t
                    ),
                )
    for tiles in ROPE_TILES:
        rope = Rope(z(128), z(128), table, table, 1e-6)
        qkv = z(tokens, 4096)
        q, k, v = (p.unflatten(-1, (-1, 128)) for p in qkv.split([2048, 1024, 1024], dim=-1))
        yield (
            f"attention+rope {tuple(tiles)}",
            lambda q=q, k=k, v=v, r=rope, t=tiles: ragged_attention(
                q, k, v, cu, scale=1.0, causal=False, rope=r, tiles=t
            ),
        )
    workspace = Workspace("cpu", 1 << 24)
    for name, n, k, epilogue, norm in GEMMS:
        for tiles in gemm_tiles(name):
            yield (
                f"gemm {name} {tuple(tiles)}",
                lambda n=n, k=k, e=epilogue, m=norm, t=tiles: skinny_gemm(
                    z(128, k), z(n, k), epilogue=e, norm_eps=m, workspace=workspace, tiles=t,
                    residual=z(128, n) if e == "residual" else None,
                ),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("filter", nargs="?", default="")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th case from the I-th on")
    args = parser.parse_args()
    shard, num_shards = map(int, args.shard.split("/"))
    found: list[tuple[str, Any]] = []
    compile_only(found)
    for index, (name, run) in enumerate(cases()):
        if args.filter not in name or index % num_shards != shard:
            continue
        try:
            run()
        except Exception as error:  # noqa: BLE001 one kernel's failure must not hide the others
            print(f"{name:48s} FAILED {type(error).__name__}: {str(error)[-300:]}", flush=True)
        for kernel, compiled in found:
            print(
                f"{name:48s} {kernel:26s} {usage(compiled.asm['cubin'])} shared {compiled.metadata.shared}", flush=True
            )
        found.clear()


if __name__ == "__main__":
    main()
