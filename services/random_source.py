"""Directories of models with random weights: every file of a real one, and of its weights no more than a seed.

Without a tokenizer of somebody's they get one of bytes: each byte of a text is a token, and the tokens from 256 on read
as their numbers. So prompts are best given as token ids.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from rose.weights.random_file import FILE_NAME, RandomWeights
from services.fetch_lock import fetch_lock
from services.random_shapes import config_json, tensors
from services.source_names import Progress, RandomSource, SourceError

VERSION = 1  # of what is written here
END = "<|end|>"  # the last token of the vocabulary: a text's end
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def make_random(source: RandomSource, cache_dir: Path, say: Progress) -> Path:
    """The model's directory in the cache, written unless it is there. Raises SourceError."""
    identity = f"{VERSION} {source.spelling} {_identity(source.tokenizer)}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    name = "-".join(filter(None, ("random", source.shape, source.head, digest)))
    directory = cache_dir / "models" / name
    with fetch_lock(cache_dir, name):
        if not directory.is_dir():
            say(f"writing {directory}: {source.shape}, random weights of seed {source.seed}")
            unfinished = directory.with_name(f"{name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            try:
                write_random(source, unfinished)
                os.replace(unfinished, directory)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def write_random(source: RandomSource, directory: Path) -> None:
    """All files into an empty directory. Raises SourceError."""
    config = config_json(source.shape, source.head)
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": END, "model_max_length": config["max_position_embeddings"]}
    if source.tokenizer is None:
        _write(directory / "tokenizer.json", _byte_tokenizer(config["vocab_size"]))
    else:
        _copy_tokenizer(source.tokenizer, directory, config["vocab_size"])
    if not (directory / "tokenizer_config.json").exists():
        _write(directory / "tokenizer_config.json", settings)
    _write(directory / "config.json", config)
    weights = RandomWeights(source.seed, tensors(source.shape, source.head, source.says))
    (directory / FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(weights), indent=1))


def _copy_tokenizer(path: Path, directory: Path, vocab_size: int) -> None:
    """A tokenizer.json, and the tokenizer_config.json beside it if there is one. Raises SourceError."""
    try:
        content = json.loads(path.read_bytes())
        vocabulary = content["model"]["vocab"]
        largest = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        largest = max([largest, *(token["id"] for token in content.get("added_tokens") or ())])
        too_large = largest >= vocab_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{path} is no tokenizer.json that can be read: {error!r}") from None
    if too_large:
        raise SourceError(
            f"{path} has token {largest}, the model {vocab_size} tokens: name a smaller tokenizer, or none"
        )
    shutil.copyfile(path, directory / "tokenizer.json")
    beside = path.with_name("tokenizer_config.json")
    if beside.is_file():
        shutil.copyfile(beside, directory / beside.name)


def _identity(path: Path | None) -> str:
    """Of a file, to notice that it has changed. Raises SourceError."""
    if path is None:
        return ""
    try:
        status = path.stat()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; name a tokenizer.json, or none") from None
    return f"{status.st_size} {status.st_mtime_ns}"


def _byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Byte-level BPE without merges: bytes, then what no text is encoded to, last the end of a text."""
    pieces = {letter: index for index, letter in enumerate(byte_letters())}
    pieces |= {f"Ġ{index}": index for index in range(len(pieces), vocab_size - 1)}
    pieces[END] = vocab_size - 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": vocab_size - 1, "content": END} | flags],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": pieces, "merges": []},
    }


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself if it prints, else one from 256 on."""
    prints = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
