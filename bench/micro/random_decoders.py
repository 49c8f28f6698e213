"""Language models with random weights made on the device, seated sequences, and decode steps of them; no files."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ipc.step import (
    GEN_GENERATION,
    GEN_KIND,
    GEN_MAX_LENGTH,
    GEN_NUM_TOKENS,
    GEN_SAMPLE,
    GEN_SLOT,
    KIND_DECODE,
    KIND_PREFILL,
    StepPlan,
)
from ipc.step_ring import Arrays, StepRing, generate_layout
from ipc.types import ModelFacts, SamplingParams
from rose.attention.paged import PagedBackend, PagedKV, PagedRows
from rose.config import RankConfig
from rose.cuda_decoder import CudaDecoder
from rose.kv_cache import BLOCK_SIZE, KVShape, allocate
from rose.models.config import ModelConfig
from rose.models.registry import build_model
from rose.models.task import GenerateTask
from rose.runner import LazyTensor
from rose.static_decoder import DecodeBatch

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
GREEDY = SamplingParams(temperature=0.0)
TASK = GenerateTask(())


def llama_8b(num_layers: int = 32, **changes: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "architecture": "LlamaForCausalLM", "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": num_layers, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "norm_eps": 1e-5,
            "max_position_embeddings": 131072, "causal": True, "gated": True, "rope_theta": 5e5,
            "attention_bias": False, **changes,
        }
    )  # fmt: skip


def random_model(config: ModelConfig, dtype: torch.dtype = BF16, seed: int = 0) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(seed)
    try:
        with DEVICE:
            model = build_model(config, TASK)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.1)
            else:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    return model.requires_grad_(False).eval()


class Seated:
    """A CudaDecoder on a page-locked ring whose slots hold sequences of one length, past their prompts."""

    def __init__(
        self,
        config: ModelConfig,
        model: nn.Module,
        *,
        num_seqs: int,
        context: int,
        room: int = 512,
        params: SamplingParams = GREEDY,
        shapes: Path | None = None,
        **settings: Any,
    ) -> None:
        self.each = -(-(context + room) // BLOCK_SIZE)
        self.facts = ModelFacts(
            name="random", architecture=config.architecture, task="generate", vocab_size=config.vocab_size,
            max_model_len=context + room, dimension=1, max_num_seqs=num_seqs,
            max_num_batched_tokens=max(8192, num_seqs), dtype="bfloat16", device="cuda",
            num_blocks=num_seqs * self.each,
        )  # fmt: skip
        torch.manual_seed(1)
        caches = allocate(KVShape.of(config, BF16), self.facts.num_blocks, DEVICE)
        for cache in caches:
            cache.k.normal_()
            cache.v.normal_()
        rank = RankConfig(**{"capture": "lazy", **settings})
        self.decoder = CudaDecoder(
            model, caches, config, self.facts, rank, device=DEVICE, tokenizer=Path("tokenizer.json"), shapes=shapes
        )
        self.ring = StepRing.create(generate_layout(self.facts))
        self.decoder.attach(self.ring)
        self.params = params  # of sequences seated from now on
        self._context, self._step = context, 0
        self.seat()

    @torch.inference_mode()
    def seat(self, lengths: list[int] | None = None) -> None:
        """Every slot holds `context` tokens, or as many as `lengths` says; all but the last have keys and values."""
        self.decoder.drain()
        torch.manual_seed(2)
        residents, count = self.decoder.residents, self.facts.max_num_seqs
        slots, host = residents.slots, residents.host
        known = torch.full((count,), self._context) if lengths is None else torch.tensor(lengths)
        slots.ids.random_(0, self.facts.vocab_size)
        slots.num_tokens[:count] = known.to(DEVICE, torch.int32)
        slots.num_computed[:count] = (known - 1).to(DEVICE, torch.int32)
        slots.num_prompt[:count] = (known - 1).to(DEVICE, torch.int32)
        order = torch.randperm(self.facts.num_blocks, device=DEVICE).int()
        slots.block_table[:count, : self.each] = order.view(count, self.each)
        host.generation[:] = 1
        for slot in range(count):
            host.params[slot] = self.params
            residents.sampler.admit(slot, self.params)
        self.decoder.drain()

    def launch(self, num_rows: int, slot: int = 0) -> tuple[LazyTensor, Arrays]:
        arrays = self.ring.slot(slot)
        table = arrays["rows"][:num_rows]
        table[:] = 0
        table[:, GEN_SLOT] = np.arange(num_rows)
        table[:, [GEN_GENERATION, GEN_NUM_TOKENS, GEN_SAMPLE]] = 1
        table[:, GEN_KIND] = KIND_DECODE
        table[:, GEN_MAX_LENGTH] = self.facts.max_model_len
        self._step += 1
        plan = StepPlan(1, self._step, slot, "generate", num_seqs=num_rows, last_applied=self._step - 1)
        return self.decoder.generate(plan, arrays), arrays

    def prompt(self, num_tokens: int) -> LazyTensor:
        """A prompt of so many tokens into the first slot, as one step. Seat sequences of one token before."""
        arrays = self.ring.slot(0)
        arrays["rows"][0] = 0, 1, num_tokens, KIND_PREFILL, 1, 0, 0, num_tokens
        arrays["input_ids"][:num_tokens] = np.arange(num_tokens) % self.facts.vocab_size
        self._step += 1
        plan = StepPlan(
            1, self._step, 0, "generate", num_seqs=1, num_tokens=num_tokens, last_applied=self._step - 1
        )  # fmt: skip
        return self.decoder.generate(plan, arrays)

    def run(self, num_rows: int, slot: int = 0) -> list[int]:
        """One step from launch to tokens on the host."""
        lazy, arrays = self.launch(num_rows, slot)
        while not lazy.ready():
            pass
        assert (arrays["status"][:num_rows] == 0).all(), arrays["status"][:num_rows].tolist()
        return arrays["tokens"][:num_rows, 0].tolist()

    def tokens(self, num_rows: int, num_steps: int, *, in_flight: int = 1) -> list[list[int]]:
        """Of each step [num_rows], with so many steps launched before the oldest is answered."""
        found: list[list[int]] = []
        pending: list[tuple[LazyTensor, Arrays]] = []
        for step in range(num_steps + in_flight - 1):
            if step < num_steps:
                pending.append(self.launch(num_rows, step % self.ring.layout.num_slots))
            if len(pending) == in_flight or step >= num_steps:
                lazy, arrays = pending.pop(0)
                while not lazy.ready():
                    pass
                found.append(arrays["tokens"][:num_rows, 0].tolist())
        return found

    def close(self) -> None:
        self.decoder.attach(None)
        self.ring.close()


class Pass:
    """A model's logits over a cache of its own, for rows given by their ids: prompts first, then what follows them."""

    def __init__(
        self,
        config: ModelConfig,
        model: nn.Module,
        attention: PagedBackend,
        dtype: torch.dtype,
        *,
        num_rows: int = 8,
        blocks_per_row: int = 64,
    ) -> None:
        self._model, self._attention = model, attention
        num_blocks = num_rows * blocks_per_row
        self._caches: list[PagedKV] = list(allocate(KVShape.of(config, dtype), num_blocks, DEVICE))
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).int()
        self._table = order.view(num_rows, blocks_per_row).to(DEVICE)

    @torch.inference_mode()
    def logits(self, rows: list[Tensor], starts: list[int]) -> Tensor:
        """rows: ids [n] of each, behind the first starts[r] that were given before -> float32 [T, V]."""
        return cast(Any, self._model).logits(self.hidden(rows, starts))

    @torch.inference_mode()
    def hidden(self, rows: list[Tensor], starts: list[int]) -> Tensor:
        """The same as hidden states [T, H]."""
        lengths = [len(ids) for ids in rows]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).int().to(DEVICE)
        index = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)).to(DEVICE)
        blocks = self._table[index, positions // BLOCK_SIZE]
        paged = PagedRows(
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE),
            kv_lengths=(torch.tensor(starts) + torch.tensor(lengths)).int().to(DEVICE),
            block_table=self._table[: len(rows)],
            slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            max_q_len=max(lengths),
            max_kv_len=max(s + n for s, n in zip(starts, lengths, strict=True)),
        )
        attend = self._attention.paged(paged, self._caches)
        return self._model(DecodeBatch(torch.cat(rows).int().to(DEVICE), positions), attend)
