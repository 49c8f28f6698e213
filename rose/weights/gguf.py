"""Reads a GGUF file, llama.cpp's format, as if it were a Hugging Face checkpoint: same names, same order of rows.

Quantised tensors become float32, one at a time. Sizes and tokenizer are in the same file, but not read here: the
config.json beside it says them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from rose.models.config import ModelError
from rose.weights.gguf_file import GgufFile, GgufTensor

ARCHITECTURES = ("llama", "qwen3")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # config.json's rope_scaling says the same


def stream_gguf(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, float32 tensor) of every tensor whose name is wanted. Raises ModelError."""
    file = GgufFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{path}: architecture {architecture!r} is not supported in GGUF (supported: {known})")
    num_heads = _turned_heads(file.metadata, path) if architecture == "llama" else {}
    for tensor in file.tensors:
        name = hugging_face_name(tensor.name)
        if tensor.name == _ROPE_FACTORS or not wanted(name):
            continue
        values = _dequantised(tensor, path)
        for module, heads in num_heads.items():
            if f".{module}." in tensor.name:
                if len(values) % (2 * heads):
                    raise ModelError(f"{path}: {tensor.name} has {len(values)} rows, which {heads} heads cannot share")
                values = halves_of_heads(values, heads)
        yield name, values


def hugging_face_name(name: str) -> str:
    """`name` itself where the models served have no such tensor: the loader refuses it by that name."""
    match name.split("."):
        case [module, kind] if module in _WHOLE:
            return f"{_WHOLE[module]}.{kind}"
        case ["blk", index, module, kind] if module in _LAYER:
            return f"model.layers.{index}.{_LAYER[module]}.{kind}"
    return name


def halves_of_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Rows [num_heads * head_dim, ...] of q or k: 0, h, 1, h + 1, ... of each head become 0, 1, ... h, h + 1, ...,
    where h = head_dim / 2: pairs that are turned together lie h apart, as in Hugging Face's files."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _turned_heads(metadata: dict[str, Any], path: Path) -> dict[str, int]:
    """How many heads q and k have. llama.cpp turns neighbouring rows of llama's, and has reordered them for that."""
    q_heads = metadata.get("llama.attention.head_count")
    counts: dict[str, Any] = {"attn_q": q_heads, "attn_k": metadata.get("llama.attention.head_count_kv", q_heads)}
    for module, count in counts.items():
        if type(count) is not int or count < 1:
            raise ModelError(f"{path}: {count!r} heads in {module}; one number of them for all layers is supported")
    return counts


def _dequantised(tensor: GgufTensor, path: Path) -> Tensor:
    try:
        values = gguf.dequantize(tensor.data, tensor.kind)
    except NotImplementedError:
        kind = tensor.kind.name
        raise ModelError(f"{path}: {tensor.name} has the type {kind}, which is not supported: use another") from None
    return torch.from_numpy(np.require(values, np.float32, "W"))  # a view of the file is copied, being read-only
