"""The models served here, as far as their files tell: tokenizer, longest sequence, prompts, template.

What only the running model knows (vocabulary, dimension, its own limit) comes with a scheduler's Status.
"""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.detokenize import TokenBytes
from gateway.generation_defaults import GenerationDefaults, GenerationDefaultsError
from gateway.structured import Grammars
from gateway.template import Prompts, RerankTemplate
from gateway.tokenize import TextTokenizer, TokenizerError

_UNLIMITED = 1 << 30  # tokenizer_config.json says "no limit" with a huge number


class ModelFilesError(ValueError):
    """A model directory that cannot be served; the text says what is missing."""


class Generator(Struct, frozen=True):
    """What it takes to generate: what tokens become, what messages do (if the model can chat), grammars, and how tokens
    are picked where a request does not say."""

    token_bytes: TokenBytes
    chat: ChatTemplate
    grammars: Grammars
    defaults: GenerationDefaults = GenerationDefaults()


class ServedModel(Struct, frozen=True):
    """`max_seq_length` counts special tokens too; None: the files name no limit. Whether the model embeds or scores
    is for its running replicas to say; should it score, `template` is its form if it has one, else plain pairs;
    should it generate, it needs a `generator`, which not all files can give."""

    name: str
    tokenizer: TextTokenizer
    max_seq_length: int | None
    prompts: Prompts
    uses_token_types: bool
    template: RerankTemplate | None = None
    generator: Generator | None = None


def load_model(name: str, directory: Path, *, generation_defaults: bool = True) -> ServedModel:
    """Reads a directory in Hugging Face layout. `generation_defaults`: generation_config.json, too. Raises
    ModelFilesError."""
    config = _read_json(directory / "config.json")
    if config is None:
        raise ModelFilesError(f"model {name!r}: {directory / 'config.json'} is missing")
    try:
        tokenizer = TextTokenizer.from_file(directory / "tokenizer.json")
        generator = _read_generator(directory, tokenizer, _is_causal(config), generation_defaults)
    except (TokenizerError, ChatTemplateError, GenerationDefaultsError) as error:
        raise ModelFilesError(f"model {name!r}: {error}") from None
    except OSError as error:
        raise ModelFilesError(f"model {name!r}: {error.filename} cannot be read: {error.strerror}") from None
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        max_seq_length=_max_seq_length(directory),
        prompts=Prompts.from_config(_read_json(directory / "config_sentence_transformers.json") or {}),
        uses_token_types=_has_token_types(config) and tokenizer.pair.type_start is not None,
        template=RerankTemplate.of(tokenizer) if _is_causal(config) else None,
        generator=generator,
    )


def _read_generator(directory: Path, tokenizer: TextTokenizer, required: bool, with_defaults: bool) -> Generator | None:
    """Raises TokenizerError, ChatTemplateError or GenerationDefaultsError if it is `required`."""
    added = [token.content for token in tokenizer.original.get_added_tokens_decoder().values()]
    try:
        defaults = GenerationDefaults.read(directory) if with_defaults else GenerationDefaults()
        return Generator(TokenBytes(tokenizer.original), ChatTemplate.read(directory), Grammars(added), defaults)
    except (TokenizerError, ChatTemplateError, GenerationDefaultsError):
        if required:
            raise
        return None


def _is_causal(config: dict[str, Any]) -> bool:
    """Whether the model could judge a pair by its next token, as Qwen3-Reranker does."""
    named = config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith("ForCausalLM") for name in named)


def _has_token_types(config: dict[str, Any]) -> bool:
    size = config.get("type_vocab_size")
    return isinstance(size, int) and size > 1


def _max_seq_length(directory: Path) -> int | None:
    for file, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        value = (_read_json(directory / file) or {}).get(key)
        if isinstance(value, int | float) and 0 < value < _UNLIMITED:
            return int(value)
    return None


def _read_json(path: Path) -> dict[str, Any] | None:
    """The file's content, None if there is no such file. Raises ModelFilesError."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} is not a JSON object: fetch the model again")
    return content
