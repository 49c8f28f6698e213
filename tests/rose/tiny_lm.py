"""Small random language models in Hugging Face layout, the same on every machine, with a tokenizer if asked for.

Written without transformers; weights come from numpy's generator, so goldens can be kept for them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.rose.random_models import QWEN3_LAYER

VOCAB_SIZE = 320
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; a text ends with 2
EOS_TOKEN_ID = 2
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# whose merges the tokenizer has; _ is the letter for a space
WORDS = "_the_of_and_to_in_is_was_for_that_with_you_it_on_are_as_be_not_have_this_from_which_can"
ENDINGS = ("ing", "tion", "er", "ed", "ly", "ent", "all", "ou")
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "eos_token_id": EOS_TOKEN_ID,
}


def write_llama(directory: Path, *, seed: int = 0, tokenizer: bool = False, **changes: Any) -> Path:
    """Llama 3 in small: grouped heads, llama3 rope scaling, a head of its own. `changes` go into config.json."""
    config = _COMMON | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 10000.0,
        "rope_scaling": LLAMA3_SCALING,
        "tie_word_embeddings": False,
    }
    return _write(directory, config | changes, seed, tokenizer)


def write_qwen3(directory: Path, *, seed: int = 0, tokenizer: bool = False, **changes: Any) -> Path:
    """Qwen3 in small: norms on q and k, the embedding is the head. `changes` go into config.json."""
    config = _COMMON | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    return _write(directory, config | changes, seed, tokenizer)


def write_relative(directory: Path, model: Path, *, noise: float) -> Path:
    """The model in `model` with `noise` in every weight, as a part of its size: it says much the same."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix == ".json":
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor.mul_(1 + noise * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, directory / "model.safetensors")
    return directory


def random_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """float32 under Hugging Face's names. Logits spread over some units, so that near ties are rare."""
    sizes = {
        "V": config["vocab_size"],
        "H": config["hidden_size"],
        "I": config["intermediate_size"],
        "D": config["head_dim"],
        "Q": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
    }
    shapes: dict[str, tuple[str, ...]] = {"model.embed_tokens.weight": ("V", "H"), "model.norm.weight": ("H",)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in QWEN3_LAYER.items():
            if config["model_type"] == "llama" and name.endswith(("q_norm", "k_norm")):
                continue
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            biased = config.get("attention_bias") and "_proj" in name and "self_attn" in name
            if biased or (config.get("mlp_bias") and "mlp" in name):
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = ("V", "H")
    random = np.random.default_rng(seed)
    return {name: _random(name, tuple(sizes[s] for s in shape), random) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
    values = torch.from_numpy(random.standard_normal(shape, np.float32))
    if len(shape) == 1:
        centre = 16.0 if name == "model.norm.weight" else 1.0 if name.endswith("weight") else 0.0
        return values * 0.1 + centre
    # small beside what the layers add: a tied head would say the last token again and again
    return values * (0.025 if "embed" in name or "lm_head" in name else shape[1] ** -0.5)


def _write(directory: Path, config: dict[str, Any], seed: int, tokenizer: bool) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(random_weights(config, seed), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [config["eos_token_id"]]}))
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Byte-level BPE of 320 tokens: specials, all bytes, and the merges of a few English words."""
    pieces = [*SPECIALS, *_byte_letters()]
    merges: list[tuple[str, str]] = []
    for word in (*("Ġ" + word for word in WORDS.split("_")[1:]), *ENDINGS):
        left = word[0]
        for letter in word[1:]:
            if left + letter not in pieces and len(pieces) < VOCAB_SIZE:
                pieces.append(left + letter)
                merges.append((left, letter))
            left += letter
    assert len(pieces) == VOCAB_SIZE, f"{len(pieces)} pieces: change the words until there are {VOCAB_SIZE}"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    raw = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text} | flags for i, text in enumerate(SPECIALS)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in merges],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": SPECIALS[EOS_TOKEN_ID], "bos_token": SPECIALS[1]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself if it prints, else one from 256 on."""
    prints = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]
