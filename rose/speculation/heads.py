"""Draft heads: one layer of a Llama or Qwen3 over the target's hidden states, with the target's embedding and head.

    x = eh_proj [norm(embedding of token i + 1), norm(hidden state of token i)]     [T, H]
    x = layer x, at position i
    x = norm x                              the next hidden state, whose logits are those of token i + 2

`mtp` is DeepSeek-V3's module (2024): all three norms and the layer's own. `eagle` is EAGLE-1's (Li et al. 2024): none
of them, and none at the layer's beginning. The target's hidden states come with its last norm applied; what the head
recycles has its own applied.

A head is a directory: config.json as of a language model (`model_type` llama or qwen3, `hidden_size` and `vocab_size`
of the target) and model.safetensors. Names, with or without `model.layers.{n}.` or `layers.0.` before them:

    mtp     enorm, hnorm (of embedding and hidden state), eh_proj [H, 2 H], shared_head.norm, input_layernorm
    eagle   fc [H, 2 H], with a bias or without
    both    self_attn.{q,k,v,o}_proj, self_attn.{q,k}_norm (qwen3), post_attention_layernorm, mlp.{gate,up,down}_proj

Copies of the target's embedding and head in the file are left out.
"""

import re
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ipc.types import ModelFacts
from rose.attention.interface import Attend
from rose.distributed.group import ALONE, Group
from rose.distributed.shard import check_sizes
from rose.layers.linear import Linear
from rose.layers.mlp import GatedMlp
from rose.layers.norm import RMSNorm
from rose.layers.rotary import Rotary
from rose.models.config import ModelConfig, ModelError, read_config
from rose.models.llama import FUSED, LlamaAttention
from rose.speculation import kernels
from rose.speculation.protocol import Target
from rose.weights.loader import load_weights, tensor_names, weight_files

HeadKind = Literal["mtp", "eagle"]
_LAYER = re.compile(r"^(model\.)?layers\.\d+\.")


class SharedHead(nn.Module):
    """The norm before the target's head, under DeepSeek's name."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class DraftHead(nn.Module):
    """The layer and what stands before and behind it. Parameters carry the files' names."""

    fused = FUSED | {"eh_proj": ("fc",)}
    unused = ("embed_tokens.", "lm_head.", "shared_head.head.")

    def __init__(self, config: ModelConfig, kind: HeadKind, *, bias: bool = False, group: Group = ALONE) -> None:
        super().__init__()
        size, eps, has_norms = config.hidden_size, config.norm_eps, kind == "mtp"
        self.enorm = RMSNorm(size, eps) if has_norms else None
        self.hnorm = RMSNorm(size, eps) if has_norms else None
        self.eh_proj = Linear(2 * size, size, bias=bias)
        self.input_layernorm = RMSNorm(size, eps) if has_norms else None
        self.self_attn = LlamaAttention(config, qk_norm=config.model_type == "qwen3", group=group)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMlp(size, config.intermediate_size, bias=config.mlp_bias, group=group)
        self.shared_head = SharedHead(config) if has_norms else None
        self.rotary = Rotary(
            config.head_dim, config.max_position_embeddings, config.rope_theta, scaling=config.rope_scaling
        )
        self.prefixes: tuple[str, ...] = ()

    def forward(self, embedding: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """embedding of each next token, hidden [T, H], positions int32 [T] -> hidden states [T, H]."""
        x = self.eh_proj(self._joined(embedding, hidden))
        x = self.self_attn(x, self.input_layernorm, self.rotary(positions), attend)
        x = self.mlp(x, self.post_attention_layernorm)
        if self.shared_head is not None:
            return self.shared_head.norm(x)
        return x if isinstance(x, Tensor) else x.added()  # what a kernel has left to add

    def _joined(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """[T, 2 H], norms applied."""
        enorm, hnorm = self.enorm, self.hnorm
        if kernels.has_kernels(hidden):
            from rose.kernels.head_input import side_by_side

            weights = None if enorm is None or hnorm is None else (enorm.weight, hnorm.weight)
            return side_by_side(embedding, hidden.contiguous(), weights, 0.0 if enorm is None else enorm.eps)
        if enorm is not None and hnorm is not None:
            embedding, hidden = enorm(embedding), hnorm(hidden)
        return torch.cat((embedding, hidden), -1)


def load_head(directory: Path, target: Target) -> tuple[DraftHead, ModelConfig]:
    """The head in `directory`, or this rank's part of it, and its shape. Raises ModelError."""
    config = check_head(directory, target.config, target.facts, target.group.size)
    names = _names(directory)
    stems = {_LAYER.sub("", name) for name in names}
    kind: HeadKind = "mtp" if "eh_proj.weight" in stems else "eagle"
    default = torch.get_default_dtype()
    torch.set_default_dtype(target.dtype)
    try:
        with target.device:
            head = DraftHead(config, kind, bias=bool({"fc.bias", "eh_proj.bias"} & stems), group=target.group)
    finally:
        torch.set_default_dtype(default)
    head.prefixes = tuple(_beginnings(names))
    load_weights(head, weight_files(directory))
    return head.requires_grad_(False).eval(), config


def _names(directory: Path) -> list[str]:
    """Of all tensors; of a .gguf file, which holds no head, none. Raises ModelError."""
    return [name for file in weight_files(directory) if file.suffix != ".gguf" for name in tensor_names(file)]


def _beginnings(names: list[str]) -> set[str]:
    """With which the names of layers begin, one for each."""
    return {found[0] for name in names if (found := _LAYER.match(name))}


def is_head(directory: Path) -> bool:
    """Whether the weights there are a draft head's. Raises ModelError."""
    return not {_LAYER.sub("", name) for name in _names(directory)}.isdisjoint(("eh_proj.weight", "fc.weight"))


def check_head(directory: Path, target: ModelConfig, facts: ModelFacts, num_ranks: int) -> ModelConfig:
    """The shape of the head in `directory`, which goes with the target on `num_ranks` ranks. Raises ModelError."""
    head = read_config(directory)
    check_sizes(head, num_ranks)
    beginnings = _beginnings(_names(directory))
    if len(beginnings) > 1:
        raise ModelError(f"{directory} holds several layers ({', '.join(sorted(beginnings))}): a head has one")
    if not is_head(directory):
        raise ModelError(f"{directory} is no draft head: it has neither eh_proj nor fc")
    for name in ("hidden_size", "vocab_size"):
        own, its = getattr(head, name), getattr(target, name)
        if own != its:
            raise ModelError(f"{directory}: {name} is {own}, the target's is {its}: this head is another model's")
    if head.model_type not in ("llama", "qwen3") or not head.causal:
        raise ModelError(f"{directory}: a head of model_type {head.model_type!r} is not supported (llama, qwen3)")
    if head.max_model_len < facts.max_model_len:
        raise ModelError(
            f"{directory} has {head.max_model_len} positions, the target is served up to max_model_len = "
            f"{facts.max_model_len}: lower rank.max_model_len or max_position_embeddings of the head is wrong"
        )
    return head
