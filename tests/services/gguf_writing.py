"""Writes small GGUF files: a shape, a byte-level BPE tokenizer trained on a few lines, weights of zeros."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LINES = [
    "the rose is a rose is a rose",
    "tulips from Amsterdam don't rhyme",
    "it's 2024 or 12345",
    "Rosen und Tulpen",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HIDDEN, HEADS = 16, 4


def train_bpe() -> tuple[list[str], list[str]]:
    """Tokens by id, special ones first, and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    tokens: Sequence[str] = (),
    kinds: Sequence[int] = (),
    tensors: Mapping[str, np.ndarray[Any, Any] | None] = {},
    **values: Any,
) -> Path:
    """A GGUF model of two layers in `path`. `values` replace metadata (`.` spelled `__`; None leaves a key out),
    `tensors` the tensors by name (None: left out)."""
    trained, merges = train_bpe()
    tokens = list(tokens or trained)
    kinds = list(kinds or [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    metadata = {
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": 32,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    } | {name.replace("__", "."): value for name, value in values.items()}
    writer = GGUFWriter(path, arch)
    for name, value in metadata.items():
        _add(writer, name, value)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    weights = {"token_embd.weight": np.zeros((len(tokens), HIDDEN), np.float32)}
    weights |= {f"blk.{i}.attn_q.weight": np.zeros((HIDDEN, HIDDEN), np.float32) for i in range(2)}
    for name, array in (weights | dict(tensors)).items():
        if array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(name, value)
    elif value is not None:
        adders[type(value)](name, value)
