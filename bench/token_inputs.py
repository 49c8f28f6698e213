"""Inputs of an exact number of tokens, cut from real passages, as ids and as text. None is given out twice.

Windows over one long stream of tokens, each from a start of its own: however many a run takes, no two begin alike,
so that no cache of prefixes finds anything.
"""

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.demo import load_passages

BATCH = 512  # texts encoded together


class NotEnoughText(ValueError):
    """The passages have too few starts for what a run takes."""


class TokenInputs:
    """Ids and texts in a seeded order."""

    def __init__(self, tokenizer: Tokenizer, passages: list[str], seed: int = 20261130) -> None:
        self._tokenizer = tokenizer
        self._text = "\n\n".join(" ".join(passage.split()) for passage in passages)
        encoding = _encode_long(tokenizer, self._text)
        self.ids, self._starts = encoding  # int32 [T]; character at which each token begins, int32 [T]
        self._order = np.random.default_rng(seed).permutation(len(self.ids)).tolist()

    def take_ids(self, length: int, count: int, *, below: int | None = None) -> list[list[int]]:
        """`count` windows of `length` ids, modulo `below` for a smaller vocabulary. Raises NotEnoughText."""
        windows: list[list[int]] = []
        while len(windows) < count:
            start = self._next_start(length)
            if start + length <= len(self.ids):
                ids = self.ids[start : start + length]
                windows.append((ids if below is None else ids % below).tolist())
        return windows

    def take_texts(self, length: int, count: int) -> list[str]:
        """`count` texts that have `length` tokens when encoded alone. Raises NotEnoughText."""
        texts: list[str] = []
        while len(texts) < count:
            candidates = [self._cut(length) for _ in range(min(BATCH, 2 * (count - len(texts)) + 8))]
            encodings = self._tokenizer.encode_batch_fast(candidates, add_special_tokens=True)
            texts += [text for text, found in zip(candidates, encodings, strict=True) if len(found) == length]
        return texts[:count]

    def _cut(self, length: int) -> str:
        """A window's text, whole words at both ends; special tokens count."""
        count = length - self._tokenizer.num_special_tokens_to_add(False)
        while True:
            start = self._next_start(length)
            if start + count >= len(self.ids):
                continue
            first, last = self._starts[start], self._starts[start + count]
            if self._between_words(first) and self._between_words(last):
                return self._text[first:last]

    def _between_words(self, at: int) -> bool:
        return self._text[at].isspace() or at == 0 or self._text[at - 1].isspace()

    def _next_start(self, length: int) -> int:
        if not self._order:
            raise NotEnoughText(f"no start is left for an input of {length} tokens: give more passages")
        return int(self._order.pop())


def read_passages(path: Path | None) -> list[str]:
    """Texts of a JSON-lines file with `text` in each line, plain or gzipped; None: the demo's."""
    if path is None:
        return [passage["text"] for passage in load_passages()]
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
    return [json.loads(line)["text"] for line in lines]


def _encode_long(tokenizer: Tokenizer, text: str, piece: int = 200_000) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Ids and first characters of a long text, encoded in pieces that end between paragraphs."""
    cuts = [0]
    while cuts[-1] < len(text):
        end = text.find("\n\n", cuts[-1] + piece)
        cuts.append(end if end > 0 else len(text))
    parts = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
    encodings = tokenizer.encode_batch(parts, add_special_tokens=False)
    ids = np.concatenate([np.array(encoding.ids, np.int32) for encoding in encodings])
    starts = [
        np.array([first for first, _ in encoding.offsets], np.int32) + begin
        for encoding, begin in zip(encodings, cuts, strict=False)
    ]
    return ids, np.concatenate(starts)
