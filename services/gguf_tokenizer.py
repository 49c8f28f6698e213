"""The tokenizer inside a GGUF file → tokenizer.json and tokenizer_config.json. Byte-level BPE only."""

import json
from typing import Any

from msgspec import Struct

from services.gguf_metadata import GgufMetadata

# llama.cpp's kinds of tokens
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
# besides eos, eot and eom of the metadata, which name one each
END_TOKENS = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}

# how the tokenizers of Llama 3 and of Qwen 2 and 3 divide text into words; they differ in how many digits make one
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(Struct, frozen=True):
    """What happens to text before BPE, and what else goes with the name in `tokenizer.ggml.pre`."""

    steps: list[dict[str, Any]]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False  # a word that is a token as a whole is one, whatever the merges
    add_bos: bool = False  # unless the file says


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _words(digits: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": _WORDS % digits}, "behavior": "Isolated", "invert": False}


_GPT2 = PreTokenizer([_byte_level(use_regex=True)])
_SMOLLM = PreTokenizer([{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)])
_LLAMA3 = PreTokenizer([_words("{1,3}"), _byte_level(use_regex=False)], ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer([_words(""), _byte_level(use_regex=False)], normalizer={"type": "NFC"})
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "smollm2": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}


def tokenizer_json(metadata: GgufMetadata, vocab_size: int) -> dict[str, Any]:
    """The content of tokenizer.json. Raises SourceError for a tokenizer of another kind."""
    pre = _pre_tokenizer(metadata)
    tokens, kinds = _tokens(metadata)
    if len(tokens) > vocab_size:
        raise metadata.error(f"{len(tokens)} tokens, but embeddings of {vocab_size}")
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(token_id, token, kind == CONTROL)
            for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps},
        "post_processor": _bos_first(metadata, tokens) if _adds_bos(metadata) else None,
        "decoder": _byte_level(use_regex=True),
        "model": _bpe(metadata, tokens, kinds, pre.ignore_merges),
    }
    _check(metadata, content)
    return content


def tokenizer_config(metadata: GgufMetadata) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens by name, chat template, longest sequence."""
    tokens, _ = _tokens(metadata)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(metadata),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.size("context_length"),
    }
    for name, key in named.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id", int, -1)
        if 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template", str, ""):
        config["chat_template"] = template
    if others := metadata.items("tokenizer.chat_templates", str):
        templates = {"default": template} | {
            name: metadata.need(f"tokenizer.chat_template.{name}", str) for name in others if name != "default"
        }
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items() if text]
    return config


def end_ids(metadata: GgufMetadata) -> list[int]:
    """Ids of the tokens that end an answer, the file's own eos first."""
    tokens, kinds = _tokens(metadata)
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id", int, -1) for key in ("eos", "eot", "eom"))
    ids = [token_id for token_id in named if 0 <= token_id < len(tokens)]
    ids += [i for i, token in enumerate(tokens) if kinds[i] == CONTROL and token in END_TOKENS]
    return list(dict.fromkeys(ids))


def _pre_tokenizer(metadata: GgufMetadata) -> PreTokenizer:
    if (model := metadata.need("tokenizer.ggml.model", str)) != "gpt2":
        kind = "a SentencePiece tokenizer" if model == "llama" else f"the tokenizer {model!r}"
        raise metadata.error(f"it has {kind}; byte-level BPE ('gpt2') is what is read from GGUF")
    if (name := metadata.need("tokenizer.ggml.pre", str)) not in PRE_TOKENIZERS:
        raise metadata.error(f"its pre-tokenizer is {name!r}; known are {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _tokens(metadata: GgufMetadata) -> tuple[list[str], list[int]]:
    """All tokens and their kinds."""
    tokens = metadata.items("tokenizer.ggml.tokens", str)
    kinds = metadata.items("tokenizer.ggml.token_type", int) or [NORMAL] * len(tokens)
    if not tokens or len(kinds) != len(tokens):
        raise metadata.error(f"it has {len(tokens)} tokens and {len(kinds)} kinds of them")
    return tokens, kinds


def _adds_bos(metadata: GgufMetadata) -> bool:
    return metadata.get("tokenizer.ggml.add_bos_token", bool, _pre_tokenizer(metadata).add_bos)


def _added(token_id: int, token: str, special: bool) -> dict[str, Any]:
    switches = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, **switches, "special": special}


def _bpe(metadata: GgufMetadata, tokens: list[str], kinds: list[int], ignore_merges: bool) -> dict[str, Any]:
    """Ids that the file only fills up with (UNUSED) belong to no text and are left out."""
    merges = [merge.split(" ") for merge in metadata.items("tokenizer.ggml.merges", str)]
    if not merges or any(len(pair) != 2 for pair in merges):
        raise metadata.error("tokenizer.ggml.merges are not pairs of tokens")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED},
        "merges": merges,
    }


def _bos_first(metadata: GgufMetadata, tokens: list[str]) -> dict[str, Any]:
    bos_id = metadata.need("tokenizer.ggml.bos_token_id", int)
    if not 0 <= bos_id < len(tokens):
        raise metadata.error(f"tokenizer.ggml.bos_token_id is {bos_id}, but there are {len(tokens)} tokens")
    bos = tokens[bos_id]

    def part(kind: str, name: str, type_id: int) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": type_id}}

    first = [part("SpecialToken", bos, 0), part("Sequence", "A", 0)]
    second = [part("SpecialToken", bos, 1), part("Sequence", "B", 1)]
    special = {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}
    return {"type": "TemplateProcessing", "single": first, "pair": first + second, "special_tokens": special}


def _check(metadata: GgufMetadata, content: dict[str, Any]) -> None:
    """Raises SourceError if the tokenizers library cannot use `content`."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise metadata.error(f"its tokenizer is inconsistent: {error}") from None
