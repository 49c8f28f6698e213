"""Tiny random models saved by transformers, as a model hub would serve them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}


def bert_config(**changes: Any) -> hf.BertConfig:
    return hf.BertConfig(**SIZES | {"max_position_embeddings": 64} | changes)


def xlm_roberta_config(**changes: Any) -> hf.XLMRobertaConfig:
    return hf.XLMRobertaConfig(
        **SIZES | {"max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1} | changes
    )


def qwen3_config(**changes: Any) -> hf.Qwen3Config:
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    return hf.Qwen3Config(**sizes | changes)


def llama_config(**changes: Any) -> hf.LlamaConfig:
    return hf.LlamaConfig(**SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64} | changes)


def save(model_class: Any, config: Any, directory: Path, *, shard: str | None = None) -> Any:
    """Random weights, the biases and norms too, in `directory`; returns transformers' model."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if "norm" in name.lower() else 0.0))
            else:
                parameter.normal_(std=0.15)
    model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    return model


def add_modules(directory: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> None:
    """modules.json as sentence-transformers writes it, and the folder of Pooling."""
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if kind == "Transformer" else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for module in modules:
        (directory / module["path"]).mkdir(exist_ok=True)
    if "Pooling" in kinds:
        folder = directory / f"{kinds.index('Pooling')}_Pooling"
        (folder / "config.json").write_text(
            json.dumps(
                {"word_embedding_dimension": SIZES["hidden_size"]} | (pooling or {"pooling_mode_mean_tokens": True})
            )
        )
