"""Models that are a shape and random weights: their config.json, and mean and spread of every tensor.

For measurements and tests of speed, memory and agreement between ranks: what they say means nothing. Knows no tensors;
rose.weights.random fills them.
"""

from typing import Any

from rose.weights.random_file import RandomTensor

HEADS = ("mtp", "eagle")  # of one layer over the model's hidden states: see rose.speculation.heads
EMBEDDING_STD = 0.05
STEADY_MEAN = 16.0  # beside which all that the layers add is small

_LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": _LLAMA3
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"head_dim": 64, "tie_word_embeddings": True},
    "llama-8b": _LLAMA3
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-70b": _LLAMA3
    | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen3-0.6b": _LLAMA3
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_669, "rope_scaling": None}
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960, "tie_word_embeddings": True},
    "tiny": _LLAMA3
    | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096},
}


def config_json(shape: str, head: str | None) -> dict[str, Any]:
    """What config.json says of the model, or of a head for it. Raises KeyError for a shape that is not known."""
    config = SHAPES[shape]
    config = config | {"torch_dtype": "bfloat16", "eos_token_id": config["vocab_size"] - 1}
    return config if head is None else config | {"num_hidden_layers": 1}


def tensors(shape: str, head: str | None, says: int | None = None) -> dict[str, RandomTensor]:
    """Every tensor of the model, or of a head for it, by its name in Hugging Face's files. Raises KeyError.

    `says`: the token that is always the likeliest, of model and head. All embeddings then have a large mean, so that
    hidden states point one way whatever was read, and the token's row of the output matrix points there, too.
    """
    config = SHAPES[shape]
    if head is not None:
        return _head(config, head, 0.0 if says is None else STEADY_MEAN)
    size, mean = [config["vocab_size"], config["hidden_size"]], 0.0 if says is None else STEADY_MEAN
    tied = config["tie_word_embeddings"]
    favoured = {} if says is None else {says: 2 * mean if tied else 2 * EMBEDDING_STD}
    found = {"model.embed_tokens.weight": RandomTensor(size, mean, EMBEDDING_STD, favoured if tied else {})}
    for index in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{index}.{name}": tensor for name, tensor in _layer(config).items()}
    found["model.norm.weight"] = _norm(config["hidden_size"])
    if not tied:
        found["lm_head.weight"] = RandomTensor(size, 0.0, EMBEDDING_STD, favoured)
    return found


def _layer(config: dict[str, Any]) -> dict[str, RandomTensor]:
    """Projections back into the stream are small, as in a trained model, so that bfloat16 does a text no harm."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    back = 0.5 / (2 * config["num_hidden_layers"]) ** 0.5
    found = {
        "input_layernorm": _norm(hidden),
        "self_attn.q_proj": _projection(q, hidden),
        "self_attn.k_proj": _projection(kv, hidden),
        "self_attn.v_proj": _projection(kv, hidden),
        "self_attn.o_proj": _projection(hidden, q, 8 * back),  # attention gives an average
        "post_attention_layernorm": _norm(hidden),
        "mlp.gate_proj": _projection(inner, hidden),
        "mlp.up_proj": _projection(inner, hidden),
        "mlp.down_proj": _projection(hidden, inner, back),
    }
    if config["model_type"] == "qwen3":
        found |= {f"self_attn.{name}_norm": _norm(config["head_dim"]) for name in "qk"}
    return {f"{name}.weight": tensor for name, tensor in found.items()}


def _head(config: dict[str, Any], kind: str, mean: float) -> dict[str, RandomTensor]:
    """`mean`: of what comes out of the first projection, where every number that goes in is about 1 or alike."""
    hidden = config["hidden_size"]
    layer = _layer(config | {"num_hidden_layers": 1})
    joins = RandomTensor([hidden, 2 * hidden], mean / (2 * hidden), (2 * hidden) ** -0.5)
    if kind == "eagle":  # no norm at the layer's beginning
        del layer["input_layernorm.weight"]
        return {f"layers.0.{name}": tensor for name, tensor in layer.items()} | {"fc.weight": joins}
    return (
        layer
        | {f"{name}.weight": _norm(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        | {"eh_proj.weight": joins}
    )


def _norm(size: int) -> RandomTensor:
    return RandomTensor([size], 1.0, 0.1)


def _projection(rows: int, columns: int, gain: float = 1.0) -> RandomTensor:
    return RandomTensor([rows, columns], 0.0, gain * columns**-0.5)
