"""Writes beside a model.gguf what a Hugging Face directory holds: config.json, the tokenizer, its template, the ends.

Llama and Qwen3 in their dense forms; whatever else a GGUF file may say is refused by name. The weights stay in it.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.gguf_metadata import GgufMetadata

MODEL_FILE = "model.gguf"
VERSION = 1  # of what is written here; directories in the cache with another one are written again
VERSION_KEY = "bouquet_gguf_version"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Llama 3.1 and 3.2 come with the factors of their rotary frequencies as a tensor; these made them
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def is_prepared(directory: Path) -> bool:
    """Whether this version has written the files of `directory`."""
    try:
        return bool(json.loads((directory / "config.json").read_bytes())[VERSION_KEY] == VERSION)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def prepare(directory: Path) -> None:
    """Reads `directory`/model.gguf and writes the other files there, config.json last. Raises SourceError."""
    from services.gguf_metadata import GgufMetadata
    from services.gguf_tokenizer import end_ids, tokenizer_config, tokenizer_json

    metadata = GgufMetadata(directory / MODEL_FILE)
    config = model_config(metadata)
    ends = end_ids(metadata)
    files = {
        "tokenizer.json": tokenizer_json(metadata, config["vocab_size"]),
        "tokenizer_config.json": tokenizer_config(metadata),
        "generation_config.json": {"bos_token_id": config["bos_token_id"], "eos_token_id": ends},
        "config.json": config,
    }
    for name, content in files.items():
        _write(directory / name, content)


def model_config(metadata: "GgufMetadata") -> dict[str, Any]:
    """The content of config.json, in Hugging Face's keys. Raises SourceError for a model of another kind."""
    arch = metadata.architecture
    _refuse_others(metadata)
    hidden_size, num_heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    head_dim = metadata.get(f"{arch}.attention.key_length", int, hidden_size // num_heads)
    rotated = metadata.get(f"{arch}.rope.dimension_count", int, head_dim)
    if not head_dim == rotated == metadata.get(f"{arch}.attention.value_length", int, head_dim):
        raise metadata.error(f"heads of {head_dim} of which {rotated} are rotated, or values of another size")
    eos = metadata.get("tokenizer.ggml.eos_token_id", int, -1)
    bos = metadata.get("tokenizer.ggml.bos_token_id", int, -1)
    rope_theta = metadata.get(f"{arch}.rope.freq_base", float, 10_000.0)
    return {
        "model_type": arch,
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": metadata.shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": _float32(metadata.need(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _float32(rope_theta),
        "rope_scaling": _rope_scaling(metadata, head_dim, rope_theta),
        "attention_bias": "blk.0.attn_q.bias" in metadata.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in metadata.shapes,
        "tie_word_embeddings": "output.weight" not in metadata.shapes,
        "bos_token_id": None if bos < 0 else bos,
        "eos_token_id": None if eos < 0 else eos,
        VERSION_KEY: VERSION,
    }


def _refuse_others(metadata: "GgufMetadata") -> None:
    arch = metadata.architecture
    if arch not in ARCHITECTURES:
        raise metadata.error(f"its architecture is {arch!r}; served from GGUF are {' and '.join(ARCHITECTURES)}")
    if metadata.get(f"{arch}.expert_count", int, 0):
        raise metadata.error("it is a mixture of experts; dense models are served")
    if metadata.get(f"{arch}.attention.sliding_window", int, 0):
        raise metadata.error("it attends in a sliding window; models with full attention are served")
    if metadata.get(f"{arch}.pooling_type", int, 0):
        raise metadata.error("it is an embedding or reranking model; those are served from safetensors")
    if "token_embd.weight" not in metadata.shapes:
        raise metadata.error("it has no token_embd.weight: it is not a whole model")


def _rope_scaling(metadata: "GgufMetadata", head_dim: int, rope_theta: float) -> dict[str, Any] | None:
    prefix = f"{metadata.architecture}.rope.scaling"
    if (factors := metadata.floats("rope_freqs.weight")) is not None:
        return _llama3_scaling(metadata, factors, head_dim, rope_theta)
    kind = metadata.get(f"{prefix}.type", str, "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise metadata.error(f"{prefix}.type is {kind!r}; 'linear' and the one of Llama 3 are served")
    return {"rope_type": "linear", "factor": _float32(metadata.need(f"{prefix}.factor", float))}


def _llama3_scaling(
    metadata: "GgufMetadata", factors: list[float], head_dim: int, rope_theta: float
) -> dict[str, Any] | None:
    """The scaling that gives `factors`, by which the frequencies are divided. Raises SourceError if none does."""
    if all(factor == 1.0 for factor in factors):
        return None
    scaling = {"rope_type": "llama3", "factor": _float32(max(factors)), **_LLAMA3_ROPE}
    expected = llama3_factors(head_dim, rope_theta, scaling)
    if len(expected) != len(factors) or any(
        not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)
    ):
        raise metadata.error("the factors in rope_freqs.weight are not those of Llama 3's scaling")
    return scaling


def llama3_factors(head_dim: int, rope_theta: float, scaling: Mapping[str, Any]) -> list[float]:
    """What Llama 3.1's scaling divides each of the head_dim / 2 rotary frequencies by (Grattafiori et al. 2024, and
    Meta's reference code): short waves stay, long ones are stretched by `factor`, those between by something between.
    """
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * rope_theta ** (2 * index / head_dim)
        waves = scaling["original_max_position_embeddings"] / wavelength  # in the context it was trained with
        smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _float32(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    text = json.dumps(content, ensure_ascii=False, indent=None if len(content) > 30 else 1)
    partial.write_text(f"{text}\n", encoding="utf-8")
    os.replace(partial, path)
