"""Random models in Hugging Face layout, written without transformers: for GPU tests, at any size."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

QWEN3_LAYER = {
    "input_layernorm": ("H",),
    "post_attention_layernorm": ("H",),
    "self_attn.q_proj": ("Q", "H"),
    "self_attn.k_proj": ("K", "H"),
    "self_attn.v_proj": ("K", "H"),
    "self_attn.o_proj": ("H", "Q"),
    "self_attn.q_norm": ("D",),
    "self_attn.k_norm": ("D",),
    "mlp.gate_proj": ("I", "H"),
    "mlp.up_proj": ("I", "H"),
    "mlp.down_proj": ("H", "I"),
}
BERT_LAYER = {
    "attention.self.query": ("H", "H"),
    "attention.self.key": ("H", "H"),
    "attention.self.value": ("H", "H"),
    "attention.output.dense": ("H", "H"),
    "attention.output.LayerNorm": ("H",),
    "intermediate.dense": ("I", "H"),
    "output.dense": ("H", "I"),
    "output.LayerNorm": ("H",),
}


def qwen3(directory: Path, *, num_layers: int = 2, vocab_size: int = 4096, pplx: bool = False, **sizes: int) -> Path:
    """Qwen3-Embedding (causal, last token, normalised) or pplx-embed (bidirectional, mean); the 0.6B's layers."""
    config = {
        "model_type": "bidirectional_pplx_qwen3" if pplx else "qwen3",
        "architectures": ["PPLXQwen3Model" if pplx else "Qwen3ForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    } | sizes
    shapes = {"embed_tokens.weight": ("V", "H"), "norm.weight": ("H",)}
    shapes |= {f"layers.{i}.{name}.weight": s for i in range(num_layers) for name, s in QWEN3_LAYER.items()}
    modules = ["Transformer", "Pooling"] if pplx else ["Transformer", "Pooling", "Normalize"]
    return _write(directory, config, shapes, modules, "mean" if pplx else "lasttoken")


def bert(directory: Path, *, head_dim: int = 32, num_layers: int = 2, vocab_size: int = 4096) -> Path:
    """MiniLM (head_dim 32) or bge-base (64) in width: mean pooling, normalised."""
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": vocab_size,
        "hidden_size": 12 * head_dim,
        "intermediate_size": 48 * head_dim,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 12,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    }
    shapes: dict[str, tuple[str, ...]] = {
        "embeddings.word_embeddings.weight": ("V", "H"),
        "embeddings.position_embeddings.weight": ("P", "H"),
        "embeddings.token_type_embeddings.weight": ("T", "H"),
        "embeddings.LayerNorm.weight": ("H",),
        "embeddings.LayerNorm.bias": ("H",),
    }
    for i in range(num_layers):
        for name, shape in BERT_LAYER.items():
            shapes[f"encoder.layer.{i}.{name}.weight"] = shape
            shapes[f"encoder.layer.{i}.{name}.bias"] = shape[:1]
    return _write(directory, config, shapes, ["Transformer", "Pooling", "Normalize"], "mean")


def _write(
    directory: Path, config: dict[str, Any], shapes: dict[str, tuple[str, ...]], modules: list[str], pooling: str
) -> Path:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    sizes = {
        "V": config["vocab_size"],
        "H": config["hidden_size"],
        "I": config["intermediate_size"],
        "P": config["max_position_embeddings"],
        "T": config.get("type_vocab_size", 0),
        "D": head_dim,
        "Q": heads * head_dim,
        "K": config.get("num_key_value_heads", heads) * head_dim,
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    tensors = {
        name: _random(name, tuple(sizes[letter] for letter in shape), generator, device)
        for name, shape in shapes.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    entries = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    return directory


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, device: str) -> Tensor:
    """bfloat16 on the host. Products keep the scale of what they multiply; norms are near one."""
    values = torch.randn(shape, generator=generator, device=device)
    if len(shape) == 1:
        values = values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    elif "embed" not in name:
        values = values * shape[1] ** -0.5
    return values.to(torch.bfloat16).cpu()
