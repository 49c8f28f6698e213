"""A language model made ready on a GPU: how much memory its largest step takes, and a cache that fills the rest."""

from pathlib import Path
from typing import cast

import torch
from msgspec.structs import replace
from torch import nn

from ipc.types import ModelFacts
from rose.config import RankConfig
from rose.cuda_decoder import CudaDecoder
from rose.cuda_stream import StepStream
from rose.decoder import LanguageModel
from rose.distributed.group import ALONE, Group, smallest
from rose.graph_memory import SLACK, CudaGraphMemory
from rose.kv_cache import KVShape, allocate, cuda_budget_bytes, num_blocks_for
from rose.largest_steps import Trial, run_largest_prompts, run_largest_verify
from rose.layers.kernel_layers import use_kernels
from rose.models.config import ModelConfig, ModelError
from rose.speculation.protocol import ProposerSource, Target
from rose.speculation.registry import load_proposer

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
        language_model = cast(LanguageModel, model)
        trial = Trial(language_model, source, shape, facts, device, tokenizer, group)
        step_bytes, verify_bytes = measure_steps(trial)
        memory = CudaGraphMemory(step_bytes)
        left = GRAPH_BYTES + verify_bytes + int((SLACK - 1) * step_bytes)
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


def measure_steps(trial: Trial) -> tuple[int, int]:
    """Bytes that the largest step takes, and that one with drafts does: a graph of it keeps as many."""
    before, verify_bytes = torch.cuda.memory_allocated(trial.device), 0
    torch.cuda.reset_peak_memory_stats(trial.device)
    if trial.facts.max_draft_tokens:
        run_largest_verify(trial)
        verify_bytes = torch.cuda.max_memory_allocated(trial.device) - before
    run_largest_prompts(trial)
    return torch.cuda.max_memory_allocated(trial.device) - before, verify_bytes
