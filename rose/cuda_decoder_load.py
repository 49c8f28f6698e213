"""A language model made ready on a GPU: how much memory its largest step takes, and a cache that fills the rest."""

from pathlib import Path
from typing import cast

import torch
from msgspec.structs import replace
from torch import nn

from ipc.types import ModelFacts
from rose.attention.paged import PagedBackend, PagedKV, PagedRows
from rose.config import RankConfig
from rose.cuda_decoder import CudaDecoder, paged_backends
from rose.cuda_stream import StepStream
from rose.decoder import LanguageModel
from rose.distributed.group import ALONE, Group, smallest
from rose.graph_memory import SLACK, CudaGraphMemory
from rose.kv_cache import BLOCK_SIZE, KVShape, allocate, cuda_budget_bytes, num_blocks_for
from rose.layers.kernel_layers import use_kernels
from rose.models.config import ModelConfig, ModelError
from rose.speculation.protocol import ProposerSource, Target
from rose.speculation.registry import load_proposer
from rose.static_decoder import DecodeBatch

GRAPH_BYTES = 1 << 30  # left for captured graphs, whose memory is their own


def load_cuda_decoder(
    model: nn.Module,
    model_config: ModelConfig,
    facts: ModelFacts,
    config: RankConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tokenizer: Path,
    shapes: Path | None,
    group: Group = ALONE,
    stream: StepStream | None = None,
) -> tuple[CudaDecoder, ModelFacts]:
    """The decoder, and `facts` with the number of blocks that there is room for on every rank. `model_config` has the
    heads of this one.

    `model` has its weights, in `dtype` on `device`; those of what drafts for it are read here. Raises ModelError,
    torch.OutOfMemoryError.
    """
    source = load_source(model, model_config, facts, config, tokenizer.parent, device, dtype, group)
    use_kernels(model)
    shape = KVShape.of(model_config, dtype)
    budget, memory = config.kv_cache_bytes, None
    if budget is None:
        attention = paged_backends(model_config, dtype, device, config)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run_largest_step(cast(LanguageModel, model), facts, shape, attention, device)
        step_bytes = torch.cuda.max_memory_allocated(device) - before
        memory = CudaGraphMemory(step_bytes)
        left = GRAPH_BYTES + int((SLACK - 1) * step_bytes)
        budget = max(0, cuda_budget_bytes(config.memory_fraction, device) - left)
    limits = {"max_num_seqs": facts.max_num_seqs, "max_model_len": facts.max_model_len}
    num_blocks = num_blocks_for(shape, budget, beside=source.kv_shape, **limits)
    num_blocks = smallest(group, num_blocks, device)
    facts = replace(facts, num_blocks=num_blocks)
    decoder = CudaDecoder(
        model,
        allocate(shape, num_blocks, device),
        model_config,
        facts,
        config,
        device=device,
        tokenizer=tokenizer,
        stream=stream,
        shapes=shapes,
        memory=memory,
        group=group,
        source=source,
        draft_caches=[] if source.kv_shape is None else allocate(source.kv_shape, num_blocks, device),
    )
    return decoder, facts


def load_source(
    model: nn.Module,
    model_config: ModelConfig,
    facts: ModelFacts,
    config: RankConfig,
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    group: Group,
) -> ProposerSource:
    """Who drafts for the model in `directory`. Raises ModelError."""
    if config.speculation.proposer == "mtp" and config.speculation.head_tokens == "accepted":
        raise ModelError(
            'speculation.head_tokens = "accepted" has each step wait for the device, which a captured one cannot: '
            'on a GPU set it to "all" or "auto"'
        )
    target = Target(model, model_config, directory, facts, dtype, device, group)
    if device.type == "cuda" or config.speculation.head_tokens != "auto":
        return load_proposer(config.speculation, target)
    return load_proposer(replace(config.speculation, head_tokens="all"), target)  # a GPU's way, without one


@torch.inference_mode()
def run_largest_step(
    model: LanguageModel, facts: ModelFacts, shape: KVShape, attention: PagedBackend, device: torch.device
) -> None:
    """A prefill of as many tokens as a step may have, and the logits of as many rows; all over one block of cache."""

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    num_tokens = facts.max_num_batched_tokens
    longest = min(num_tokens, facts.max_model_len)
    num_rows = -(-num_tokens // longest)
    offsets = (torch.arange(num_rows + 1, dtype=torch.int32, device=device) * longest).clamp_(max=num_tokens)
    rows = PagedRows(
        cu_seqlens_q=offsets,
        kv_lengths=offsets.diff(),
        block_table=zeros(num_rows, -(-longest // BLOCK_SIZE)),
        slot_mapping=zeros(num_tokens),
        max_q_len=longest,
        max_kv_len=longest,
    )
    size = (1, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    cache = PagedKV(*(torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(2)))
    attend = attention.paged(rows, [cache] * shape.num_layers)
    hidden = cast(nn.Module, model)(DecodeBatch(zeros(num_tokens), zeros(num_tokens)), attend)
    logits = model.logits(hidden[: facts.max_num_seqs])
    del hidden
    logits.clone()  # sampling's, where log probabilities need the logits as they were
