"""A decoder's steps on CPU: one after another on a thread of their own. See rose.model_runner for the interface."""

from functools import partial
from pathlib import Path
from typing import cast

import torch
from msgspec.structs import replace
from torch import nn

from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts
from rose.attention.paged_reference import ReferencePagedBackend
from rose.config import RankConfig
from rose.cpu_stream import CpuStream
from rose.decoder import Decoder, DecoderParts, LanguageModel
from rose.distributed.group import ALONE, Group, smallest
from rose.kv_cache import KVShape, allocate, cpu_budget_bytes, num_blocks_for
from rose.layers.device_layers import use_device_layers
from rose.models.config import ModelConfig
from rose.residents import Residents
from rose.runner import LazyTensor
from rose.speculation.protocol import ProposerParts, Target
from rose.speculation.registry import load_proposer


class CpuDecoder:
    """Each step has all `num_threads` cores: the next one needs its tokens."""

    idle_work = False

    def __init__(self, decoder: Decoder, num_threads: int) -> None:
        self._decoder = decoder
        self._stream = CpuStream(num_threads, in_order=True)

    def generate(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        return self._stream.launch([partial(self._decoder.run, plan, arrays)])

    def idle(self) -> LazyTensor:
        return self._stream.launch([])

    def attach(self, ring: StepRing | None) -> None:
        """A CPU reads any memory; whoever was in a slot belonged to another scheduler."""
        self._decoder.clear()

    def drain(self) -> None:
        self._stream.drain()

    def close(self) -> None:
        self._stream.close()

    def figures(self) -> dict[str, float]:
        return {}


def load_cpu_decoder(
    model: nn.Module,
    model_config: ModelConfig,
    facts: ModelFacts,
    config: RankConfig,
    *,
    tokenizer: Path,
    num_threads: int,
    group: Group = ALONE,
) -> tuple[CpuDecoder, ModelFacts]:
    """The decoder, and `facts` with the number of blocks that there is room for on every rank. `model` has its weights,
    `model_config` the heads of this rank.

    Raises ModelError where the cache would not hold one sequence of full length.
    """
    device = torch.device("cpu")
    use_device_layers(model, device)
    shape = KVShape.of(model_config, getattr(torch, facts.dtype))
    budget = cpu_budget_bytes() // group.size if config.kv_cache_bytes is None else config.kv_cache_bytes
    target = Target(model, model_config, tokenizer.parent, facts, shape.dtype, device, group)
    source = load_proposer(config.speculation, target)
    limits = {"max_num_seqs": facts.max_num_seqs, "max_model_len": facts.max_model_len}
    num_blocks = num_blocks_for(shape, budget, beside=source.kv_shape, **limits)
    num_blocks = smallest(group, num_blocks, device)
    facts = replace(facts, num_blocks=num_blocks)
    attention, residents = ReferencePagedBackend(), Residents(facts, device, tokenizer)
    parts = DecoderParts(cast(LanguageModel, model), allocate(shape, num_blocks, device), attention)
    own = [] if source.kv_shape is None else allocate(source.kv_shape, num_blocks, device)
    proposer = source.open(ProposerParts(residents, own, attention, parts.caches))
    decoder = Decoder(parts, residents, facts, proposer, group)
    return CpuDecoder(decoder, num_threads), facts
