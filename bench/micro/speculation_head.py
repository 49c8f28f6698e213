"""The pass of a draft head that closes a step: over all its tokens, or over one for each sequence, which needs a wait.

A part of bench.micro.speculation_step. The head of the shape's random weights alone, with the embedding in front of it,
CONTEXT tokens behind each sequence.
"""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ipc.types import ModelFacts
from rose.attention.paged import PagedBackend, PagedRows
from rose.attention.paged_reference import ReferencePagedBackend
from rose.kv_cache import BLOCK_SIZE, KVShape, allocate
from rose.layers.device_layers import use_device_layers
from rose.layers.embedding import Embedding
from rose.models.config import ModelConfig, read_config
from rose.speculation.heads import DraftHead, load_head
from rose.speculation.passes import Tokens
from rose.speculation.protocol import Target
from services.sources import resolve_source

if TYPE_CHECKING:
    from bench.micro.speculation_step import Options

LENGTHS = (1, 2, 3)
REPEATS = 5  # on a CPU


def measure(options: "Options", save: Callable[[dict[str, Any]], object], left: Callable[[], float]) -> None:
    """One record for each number of sequences and of drafts."""
    from bench.micro.speculation_step import STEPS, target

    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    directory, config = resolve_source(f"random:{options.shape}?head=mtp", options.cache), read_config(target(options))
    facts = ModelFacts("head", config.architecture, "generate", config.vocab_size, 2048, 1, max(STEPS), 8192)
    head, shape = load_head(directory, Target(nn.Identity(), config, directory, facts, dtype, device))
    use_device_layers(head, device)
    passes = _Passes(head, shape, dtype, device, max(STEPS) if not options.quick else 4)
    for batch in (1, 4) if options.quick else STEPS:
        for length in LENGTHS:
            if left() <= 0:
                return
            times = {"all_us": passes.microseconds(batch, length + 1), "one_us": passes.microseconds(batch, 1)}
            save({"what": "head", "batch": batch, "length": length} | times)


class _Passes:
    def __init__(
        self, head: DraftHead, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_seqs: int
    ) -> None:
        from bench.micro.speculation_step import CONTEXT

        self._head, self._device, self._context = head, device, CONTEXT
        self._blocks = -(-(CONTEXT + max(LENGTHS) + 1) // BLOCK_SIZE)
        shape = KVShape.of(config, dtype)._replace(num_layers=1)
        self._caches = allocate(shape, max_seqs * self._blocks, device)
        for cache in self._caches:
            cache.k.normal_()
            cache.v.normal_()
        with device:
            self._embedding = Embedding(config.vocab_size, config.hidden_size).to(dtype).requires_grad_(False)
        self._embedding.weight.normal_()
        self._hidden = torch.randn(max_seqs * (max(LENGTHS) + 1), config.hidden_size, dtype=dtype, device=device)
        self._attention = _attention(device)

    @torch.inference_mode()
    def microseconds(self, num_rows: int, q: int) -> float:
        """Of one pass over `q` tokens of each row."""
        tokens = self._tokens(num_rows, q)

        def run() -> Tensor:
            attend = self._attention.paged(tokens.paged, self._caches)
            hidden = self._hidden[: len(tokens.input_ids)]
            return self._head(self._embedding(tokens.input_ids), hidden, tokens.positions, attend)

        if self._device.type == "cuda":
            from bench.micro.gpu_timing import graph_us

            return graph_us([run])
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e6)
        return statistics.median(times)

    def _tokens(self, num_rows: int, q: int) -> Tokens:
        def ints(values: Tensor) -> Tensor:
            return values.to(self._device, torch.int32)

        positions = (self._context + torch.arange(q)).repeat(num_rows)
        table = torch.randperm(num_rows * self._blocks).view(num_rows, self._blocks)
        blocks = table.repeat_interleave(q, 0).gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0]
        rows = PagedRows(
            cu_seqlens_q=ints(torch.arange(num_rows + 1) * q),
            kv_lengths=ints(torch.full((num_rows,), self._context + q)),
            block_table=ints(table),
            slot_mapping=ints(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            max_q_len=q,
            max_kv_len=self._context + q,
        )
        return Tokens(ints(torch.arange(num_rows * q) % 100), ints(positions), rows)


def _attention(device: torch.device) -> PagedBackend:
    if device.type == "cpu":
        return ReferencePagedBackend()
    from rose.attention.paged_triton import TritonPagedBackend

    return TritonPagedBackend()
