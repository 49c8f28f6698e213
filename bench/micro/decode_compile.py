"""Compiles every kernel of generation for Hopper on a machine without a GPU: see bench.micro.compile_kernels.

    python -m bench.micro.decode_compile [FILTER]

Fails where one does not compile, or takes more shared memory than an H200 has: Triton's interpreter, in which they are
tested, forgives more than its compiler.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.micro.compile_kernels import SHARED_BYTES, compile_only, usage, zeros
from ipc.types import ModelFacts
from rose.attention.paged import PagedRows
from rose.decode_buffers import DecodeBuffers
from rose.graph_policy import GraphKey
from rose.kernels.accept import DrawnAt, accept_drawn, accept_draws
from rose.kernels.draft_rows import close_rows, row_places, spread_logits, take_rows, tokens_before
from rose.kernels.flat_table import flat_table
from rose.kernels.head_input import side_by_side
from rose.kernels.kv_append import Append, kv_append
from rose.kernels.launch import next_power_of_2
from rose.kernels.n_gram import look_up
from rose.kernels.paged_attention import Splits, default_splits, paged_attention
from rose.kernels.paged_prefill import paged_prefill
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.kernels.sampling import TritonOps
from rose.kernels.sampling_kept import kept
from rose.kernels.slot_rows import advance_rows, mark_non_finite, slot_rows
from rose.sampling.params import Needs
from rose.sampling.sampler import Sampler
from rose.slots import RowInputs, Slots, Spans

CPU = torch.device("cpu")
HEADS = ((32, 8, 128), (8, 1, 128), (16, 8, 128), (9, 3, 64), (32, 2, 256))
ROWS = (8, 1, 16, 32, 128)  # of the first heads; the others: of as many as the first
LIMITS = ((8192, 128, 0), (16, 1, 0), (100, 7, 3), (15, 1, 1))  # max_model_len, max_num_seqs, max_draft_tokens


def int32s(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


def attend(heads: tuple[int, int, int], q: int, splits: Splits) -> None:
    num_heads, num_kv_heads, head_dim = heads
    cache = zeros(9, 16, num_kv_heads, head_dim)
    paged_attention(
        zeros(8 * q, num_heads, head_dim), cache, cache, int32s(9), int32s(8), int32s(8, 512),
        scale=1.0, max_q_len=q, splits=splits,
    )  # fmt: skip


def prefill(heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim = heads
    cache = zeros(9, 16, num_kv_heads, head_dim)
    paged_prefill(zeros(300, num_heads, head_dim), cache, cache, int32s(4), int32s(3), int32s(3, 512), scale=1.0)


def append() -> None:
    cache, qkv = zeros(9, 16, 8, 128), zeros(4, 6144)
    k, v = (part.unflatten(-1, (8, 128)) for part in qkv[:, 4096:].chunk(2, dim=-1))
    kv_append(k, v, cache, cache, int32s(4))


def turn(heads: tuple[int, int, int], norm: bool) -> None:
    """With and without appending."""
    num_heads, num_kv_heads, head_dim = heads
    cache, angles = zeros(9, 16, num_kv_heads, head_dim), zeros(512, head_dim // 2, dtype=torch.float32)
    qkv, weight = zeros(4, (num_heads + 2 * num_kv_heads) * head_dim), zeros(head_dim) if norm else None
    for append in (None, Append(cache, cache, int32s(4))):
        qk_norm_rope(
            qkv, weight, weight, int32s(4), angles, angles,
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, append=append,
        )  # fmt: skip


def rows(max_model_len: int, max_num_seqs: int, max_draft_tokens: int, q: int) -> None:
    facts = ModelFacts(
        name="", architecture="", task="generate", vocab_size=128256, max_model_len=max_model_len, dimension=1,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=512, num_blocks=99, max_draft_tokens=max_draft_tokens,
    )  # fmt: skip
    slots = Slots(facts, 99, CPU)
    buffers = DecodeBuffers(facts, slots.block_table.shape[1], CPU)
    views = buffers.rows(GraphKey("decode", max_num_seqs, max_num_seqs * q, q, "triton"))
    slot_rows(slots, views, int32s(max_num_seqs, q - 1))
    out = buffers.row_outputs(max_num_seqs)
    advance_rows(slots, views, int32s(max_num_seqs, q), buffers.ones, buffers.zeros, out)


def sample(num_rows: int, needs: Needs) -> None:
    """Every kernel that a step with such needs launches."""
    sampler = Sampler(
        max_num_seqs=num_rows, vocab_size=128256, max_logprobs=20, eos_token_ids=(2,), device=CPU, ops=TritonOps()
    )
    sampler.state.reserve()
    logits, each = zeros(num_rows, 128256, dtype=torch.float32), int32s(num_rows)
    tokens = sampler.draw(logits, each, each, each, needs=needs, bitmask=int32s(num_rows, 4008))
    if needs.logprobs:
        sampler.logprobs(logits, tokens)
    sampler.count(each, tokens, needs)


def accept(num_rows: int, k: int) -> None:
    """Penalties at verified places, and both ways of acceptance."""
    places = num_rows * (k + 1)
    sampler = Sampler(
        max_num_seqs=num_rows, vocab_size=128256, max_logprobs=20, eos_token_ids=(2,), device=CPU, ops=TritonOps()
    )
    sampler.state.reserve()
    logits, each = zeros(places, 128256, dtype=torch.float32), int32s(places)
    sampler.draw(logits, each, each, each, needs=Needs(penalties=True), before=int32s(places, k))
    starts, drafts, counts = int32s(num_rows + 1), int32s(num_rows, k), int32s(num_rows)
    accept_draws(each, starts, drafts, counts)
    for truncation in (False, True):
        needs = Needs(random=True, truncation=truncation)
        kept_rows = kept(logits, sampler.state, each, needs)
        probabilities = zeros(num_rows, k, 128256, dtype=torch.float32)
        accept_drawn(kept_rows, sampler.state, DrawnAt(each, each, starts), drafts, counts, probabilities)
        sampler.draw_drafts(logits, each, each, each, needs=needs, probabilities=logits)
    sampler.draw_drafts(logits, each, each, each, needs=Needs(), probabilities=logits)


def propose(max_model_len: int, num_rows: int, k: int) -> None:
    """What proposers launch beside their models."""
    facts = ModelFacts(
        name="", architecture="", task="generate", vocab_size=128256, max_model_len=max_model_len, dimension=1,
        max_num_seqs=num_rows, max_num_batched_tokens=512, num_blocks=99, max_draft_tokens=k,
    )  # fmt: skip
    slots, rows = Slots(facts, 99, CPU), int32s(num_rows)
    whole = zeros(100, dtype=torch.uint8)
    for each in (None, whole):
        for from_before in (False, True):
            row_places(slots, rows, rows, k, each, from_before=from_before)
    look_up(rows, rows, slots.ids, slots.num_tokens, k, slots.ids.shape[1], (4, 2))
    table, spans = int32s(num_rows, slots.block_table.shape[1]), Spans(int32s(num_rows + 1), rows, rows)
    read = PagedRows(spans.cu_seqlens, rows, table, rows, 1, max_model_len)
    tokens_before(slots, RowInputs(rows, rows, read, rows, rows, spans))
    paged, states = (int32s(num_rows + 1), rows, int32s(num_rows * (k + 1))), zeros(num_rows * (k + 1), 4096)
    close_rows(slots, whole, rows, paged, filled=False)
    close_rows(slots, whole, rows, paged, filled=True)
    close_rows(slots, whole, rows, paged, filled=True, num_places=k + 1, kept=(rows, rows))
    hidden = zeros(num_rows + 1, 4096)
    close_rows(slots, whole, rows, paged, filled=True, kept=(rows, rows), states=(states, hidden))
    take_rows(hidden, rows)
    for weights in (None, (zeros(4096), zeros(4096))):
        side_by_side(zeros(num_rows, 4096), zeros(num_rows, 4096), weights, 1e-5)
    spread_logits(zeros(num_rows, 32768), int32s(128256))


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for heads in HEADS:
        for q in (1, 5):
            tile_rows = max(16, next_power_of_2(heads[0] // heads[1] * q))
            counts = ROWS if heads == HEADS[0] else ROWS[:1]
            chosen = [default_splits(count, heads[1], heads[2], 1 << 20, tile_rows) for count in counts]
            for splits in {each[2:]: each for each in chosen}.values():  # what is compiled differs in those alone
                name = f"attend {'/'.join(map(str, heads))} q{q} {splits[2:]}"
                yield name, lambda a=(heads, q, splits): attend(*a)
        yield f"prefill {heads}", lambda h=heads: prefill(h)
        for norm in (False, True):
            yield f"turn {heads} norm {norm}", lambda a=(heads, norm): turn(*a)
    yield "kv_append", append
    for count in (1, 128):
        yield (
            f"flat_table {count}",
            lambda n=count: flat_table(int32s(n), int32s(n, 77), 16, int32s(n + 1), int32s(n * 77), int32s(n)),
        )
    for limits in LIMITS:
        for q in {1, limits[2] + 1}:
            yield f"rows {limits} q{q}", lambda a=(*limits, q): rows(*a)
    for count in (1, 8):
        for needs in (Needs(), Needs(*(True for _ in Needs._fields)), Needs(random=True)):
            yield f"sample {count} {sum(needs)} needs", lambda a=(count, needs): sample(*a)
    for k in (1, 4):
        yield f"accept {k} drafts", lambda k=k: accept(4, k)
    for num_rows, k in ((1, 1), (8, 3), (64, 4)):
        yield f"propose {num_rows} rows {k} drafts", lambda a=(8192, num_rows, k): propose(*a)
    yield "mark_non_finite", lambda: mark_non_finite(zeros(4, 128256, dtype=torch.float32), int32s(4))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("filter", nargs="?", default="")
    args = parser.parse_args()
    found: list[tuple[str, Any]] = []
    compile_only(found)
    failed = False
    for name, run in cases():
        if args.filter not in name:
            continue
        try:
            run()
        except Exception as error:  # noqa: BLE001 - one kernel's failure must not hide the others
            print(f"{name:40s} FAILED {type(error).__name__}: {str(error)[-300:]}", flush=True)
            failed = True
        for kernel, compiled in found:
            shared = compiled.metadata.shared
            print(f"{name:40s} {kernel:20s} {usage(compiled.asm['cubin'])} shared {shared}", flush=True)
            if shared > SHARED_BYTES:
                print(f"{name:40s} FAILED {kernel} takes {shared} bytes of shared memory", flush=True)
                failed = True
        found.clear()
    sys.exit(failed)


if __name__ == "__main__":
    main()
