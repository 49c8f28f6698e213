"""Heads that have learnt nothing: what tests of heads run."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rose.models.config import read_config, read_json
from rose.speculation.heads import HeadKind


def write_random_head(directory: Path, target: Path, kind: HeadKind, *, seed: int = 0, **changes: Any) -> Path:
    """A head for the model in `target`, float32. `changes` go into its config.json, which is the target's otherwise.

    Projections keep the scale of what they multiply; norms are ones. Raises ModelError.
    """
    raw = read_json(target / "config.json") | {"num_hidden_layers": 1} | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=1))
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": _random(size, generator) for name, size in _sizes(directory, kind).items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def _random(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * size[1] ** -0.5


def _sizes(directory: Path, kind: HeadKind) -> dict[str, tuple[int, ...]]:
    config = read_config(directory)
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    sizes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if config.model_type == "qwen3":
        sizes |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    if kind == "eagle":
        return {f"layers.0.{name}": size for name, size in sizes.items()} | {"fc": (hidden, 2 * hidden)}
    sizes |= dict.fromkeys(("enorm", "hnorm", "shared_head.norm", "input_layernorm"), (hidden,))
    return sizes | {"eh_proj": (hidden, 2 * hidden)}
