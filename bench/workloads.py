"""Texts of a given number of tokens, cut from the demo's real passages with a model's own tokenizer."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer

from bench.demo import load_passages


def load_tokenizer(directory: Path) -> Tokenizer:
    """The model's tokenizer without the truncation and padding that its file may ask for."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Tokens of `text`, special ones included."""
    return len(tokenizer.encode(text).ids)


def cut(tokenizer: Tokenizer, text: str, length: int) -> str | None:
    """The beginning of `text` that has exactly `length` tokens, special ones included.

    None when there is none: the text is too short, or no cut gives that number.
    """
    encoding = tokenizer.encode(text)
    excess = len(encoding.ids) - length
    ends = [
        end for (_, end), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True) if not special
    ]
    if not 0 <= excess < len(ends):
        return None
    cut_text = text[: ends[len(ends) - 1 - excess]]
    return cut_text if num_tokens(tokenizer, cut_text) == length else None


def passage_stream() -> Iterator[str]:
    """The demo's passages for ever: first as they are, then joined from later and later starts, so none repeats."""
    texts = [" ".join(passage["text"].split()) for passage in load_passages()]
    yield from texts
    for words in itertools.count(10, 10):
        for text in texts:
            if rest := text.split()[words:]:
                yield " ".join(rest)
        if words > 150:
            return


def texts_of(tokenizer: Tokenizer, length: int, count: int, sources: Iterable[str] | None = None) -> list[str]:
    """`count` different texts of exactly `length` tokens each; long ones join several passages."""
    found: dict[str, None] = {}
    buffer = ""
    for text in passage_stream() if sources is None else sources:
        buffer = f"{buffer} {text}".strip()
        if num_tokens(tokenizer, buffer) < length:
            continue
        if (result := cut(tokenizer, buffer, length)) is not None:
            found[result] = None
        buffer = ""
        if len(found) == count:
            return list(found)
    raise ValueError(f"only {len(found)} different texts of {length} tokens could be cut, {count} were asked for")


def natural_texts(tokenizer: Tokenizer, max_length: int, count: int) -> list[str]:
    """`count` passages as they are, of at most `max_length` tokens."""
    texts = (passage["text"] for passage in load_passages())
    return list(itertools.islice((text for text in texts if num_tokens(tokenizer, text) <= max_length), count))
