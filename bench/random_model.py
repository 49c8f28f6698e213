"""Directories of Qwen3's or Llama's shape with seeded random weights: good for speed and agreement, useless for search.

    python -m bench.random_model DIRECTORY --tokenizer tokenizer.json [--size 0.6b | tiny | llama-8b]

writes `embed` (Qwen3-Embedding: causal, last token, normalised), `score` (Qwen3-Reranker: "yes" against "no"), `pplx`
(bidirectional, mean, not normalised) and `generate` (Qwen3, tied) into DIRECTORY; one weights file, linked. Of
llama-8b only `generate`, with a head of its own.
Projections back into the stream are small, as in a trained model, so that a vector depends on the whole text and bf16
does it no harm.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import Struct
from safetensors.torch import save_file

SEED = 20261130
EMBEDDING_STD = 0.05
KINDS = ("embed", "score", "pplx")  # of the tables


class Shape(Struct, frozen=True):
    """A Qwen3 or Llama model's sizes."""

    num_layers: int = 28
    hidden: int = 1024
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocabulary: int = 151_669
    positions: int = 32_768
    model_type: Literal["qwen3", "llama"] = "qwen3"

    @property
    def is_llama(self) -> bool:
        return self.model_type == "llama"

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("generate",) if self.is_llama else (*KINDS, "generate")


SHAPES = {
    "0.6b": Shape(),
    "tiny": Shape(num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=96, positions=8192),
    "llama-8b": Shape(
        num_layers=32, hidden=4096, num_heads=32, intermediate=14_336, vocabulary=128_256, model_type="llama"
    ),
}


def write_models(target: Path, tokenizer: Path, shape: Shape) -> dict[str, Path]:
    """Kind → directory; what is there already is kept. `tokenizer` is a tokenizer.json of Qwen's vocabulary."""
    directories = {kind: target / kind for kind in shape.kinds}
    if all((directory / "complete").exists() for directory in directories.values()):
        return directories
    for directory in directories.values():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    first, *others = directories.values()
    weights = first / "model.safetensors"
    save_file(random_weights(shape), str(weights), metadata={"format": "pt"})
    for kind, directory in directories.items():
        if directory in others:
            os.link(weights, directory / weights.name)
        shutil.copyfile(tokenizer, directory / "tokenizer.json")
        for name, content in _files(kind, shape).items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(json.dumps(content, indent=1))
        (directory / "complete").touch()
    return directories


def random_weights(shape: Shape) -> dict[str, torch.Tensor]:
    """bfloat16 on the CPU; the same for a seed and a kind of device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.empty(rows, columns, device=device).normal_(0, std, generator=generator).bfloat16().cpu()

    def near_one(size: int) -> torch.Tensor:
        return torch.empty(size, device=device).normal_(1, 0.1, generator=generator).bfloat16().cpu()

    hidden, back = shape.hidden, 0.5 / (2 * shape.num_layers) ** 0.5
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": normal(shape.vocabulary, hidden, EMBEDDING_STD),
        "model.norm.weight": near_one(hidden),
    }
    if shape.is_llama:
        weights["lm_head.weight"] = normal(shape.vocabulary, hidden, EMBEDDING_STD)
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}."
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = normal(size, hidden, hidden**-0.5)
        weights[f"{layer}self_attn.o_proj.weight"] = normal(hidden, q_size, 8 * back * q_size**-0.5)  # of an average
        for name in ("gate", "up"):
            weights[f"{layer}mlp.{name}_proj.weight"] = normal(shape.intermediate, hidden, hidden**-0.5)
        weights[f"{layer}mlp.down_proj.weight"] = normal(hidden, shape.intermediate, back * shape.intermediate**-0.5)
        for name in () if shape.is_llama else ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{layer}{name}.weight"] = near_one(shape.head_dim)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = near_one(hidden)
    return weights


def _files(kind: str, shape: Shape) -> dict[str, Any]:
    """Every file but weights and vocabulary, by path."""
    files: dict[str, Any] = {
        "config.json": _config(kind, shape),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.positions,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
    }
    if kind in ("score", "generate"):
        return files
    modules = ["Transformer", "Pooling", *(["Normalize"] if kind == "embed" else [])]
    files["modules.json"] = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(modules)
    ]
    files["1_Pooling/config.json"] = {
        "word_embedding_dimension": shape.hidden,
        "pooling_mode_lasttoken": kind == "embed",
        "pooling_mode_mean_tokens": kind == "pplx",
        "pooling_mode_cls_token": False,
    }
    if kind == "embed":
        files["2_Normalize/config.json"] = {}
    return files


def _config(kind: str, shape: Shape) -> dict[str, Any]:
    names = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "bidirectional_pplx_qwen3": "PPLXQwen3Model"}
    model_type = "bidirectional_pplx_qwen3" if kind == "pplx" else shape.model_type
    return {
        "architectures": [names[model_type]],
        "model_type": model_type,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "attention_bias": False,
        "tie_word_embeddings": not shape.is_llama,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": min(151_643, shape.vocabulary - 2),
        "eos_token_id": min(151_645, shape.vocabulary - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.random_model", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--size", choices=SHAPES, default="0.6b")
    args = parser.parse_args()
    began = time.perf_counter()
    written = write_models(args.directory, args.tokenizer, SHAPES[args.size])
    print(f"{args.directory}: {', '.join(written)} ({time.perf_counter() - began:.1f} s)")


if __name__ == "__main__":
    main()
