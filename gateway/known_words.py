"""Encodes short texts from a table of words met before: a few times as fast as the library, which divides and merges
each word anew.

For byte-level BPE with the patterns below the ids of a text are those of its words, one after the other. Python's
pattern finds the same words as the library's in texts whose characters both are known to judge alike, and that NFC
leaves as they are: Latin, Greek and Cyrillic without combining marks, and usual punctuation. Other texts are the
library's.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC

# Of up to _LONG characters; longer ones count several times. Some 20 MB, then the table begins anew.
MAX_WORDS = 1 << 16
_LONG = 64
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = (rf"{_WORD}|\p{{N}}|{_REST}", rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}")  # Qwen 2 and 3, Llama 3
_LETTERS = ((0x0, 0x24F), (0x370, 0x3FF), (0x400, 0x52F), (0x1E00, 0x1EFF))  # Latin, Greek, Cyrillic
_BLOCKS = (*_LETTERS, (0x2010, 0x2027), (0x2030, 0x205E), (0x20AC, 0x20AC), (0x2122, 0x2122))
_FOLDED = "\u017f"  # to s, where case does not count
_SPACES = "\t\n\x0b\x0c\r \x85\xa0"  # Unicode's of these blocks; Python's \s has four more

Ids = list[int]


def _is_alike(char: str) -> bool:
    """Whether it was assigned long ago, joins nothing and is not joined."""
    category = unicodedata.category(char)
    return category != "Cn" and category[0] != "M" and unicodedata.normalize("NFC", char) == char


_CHARS = [chr(at) for first, last in _BLOCKS for at in range(first, last + 1) if _is_alike(chr(at))]
_ALIKE = [char for char in _CHARS if char != _FOLDED]


def _class(chars: Iterable[str]) -> str:
    """The inside of a pattern's brackets."""
    codes = sorted(map(ord, chars))
    ends = [at for at, (a, b) in enumerate(pairwise(codes)) if b != a + 1] + [len(codes) - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return "".join(rf"\U{codes[a]:08x}-\U{codes[b]:08x}" for a, b in zip(starts, ends, strict=True))


_OTHER = re.compile(f"[^{_class(_ALIKE)}]")


def _compiled(pattern: str) -> Callable[[str], list[str]]:
    """Of one of _PATTERNS, with Python's means: finds a text's words."""
    letters = _class(char for char in _ALIKE if unicodedata.category(char)[0] == "L")
    numbers = _class(char for char in _ALIKE if unicodedata.category(char)[0] == "N")
    spaces = _class(_SPACES)
    classes = {
        r"[^\r\n\p{L}\p{N}]": rf"[^\r\n{letters}{numbers}]",
        r"[^\s\p{L}\p{N}]": f"[^{spaces}{letters}{numbers}]",
    }
    classes |= {r"\p{L}": f"[{letters}]", r"\p{N}": f"[{numbers}]", r"\s": f"[{spaces}]", r"\S": f"[^{spaces}]"}
    for theirs, ours in classes.items():
        pattern = pattern.replace(theirs, ours)
    return re.compile(pattern).findall


class KnownWords:
    """May be called from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, pattern: str) -> None:
        """`tokenizer` takes special tokens for text. `pattern`: its own."""
        self._tokenizer = tokenizer
        self._words = _compiled(pattern)
        added = tokenizer.get_added_tokens_decoder().values()
        self._added = [token.content for token in added if not token.special]
        self._table: dict[str, Ids] = {}
        self._size = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "KnownWords | None":
        """None for a tokenizer that it is not proved for."""
        if not isinstance(tokenizer.model, BPE) or tokenizer.model.dropout is not None:
            return None
        if tokenizer.normalizer is not None and not isinstance(tokenizer.normalizer, NFC):
            return None
        pattern = None if tokenizer.pre_tokenizer is None else _pattern(tokenizer.pre_tokenizer)
        return None if pattern is None else cls(tokenizer, pattern)

    def takes(self, text: str) -> bool:
        return _OTHER.search(text) is None and not any(content in text for content in self._added)

    def encode(self, text: str) -> Ids | None:
        """Ids without special tokens; None for a text that is the library's."""
        if not self.takes(text):
            return None
        words, table = self._words(text), self._table
        missing = {word for word in words if word not in table}
        if missing and not self._learn(table, list(missing)):
            return None
        return list(chain.from_iterable(map(table.__getitem__, words)))

    def _learn(self, table: dict[str, Ids], words: list[str]) -> bool:
        """False where one of them is several by itself."""
        if any(self._words(word) != [word] for word in words):
            return False
        # as one text in words: this call stays in its thread, and a batch wakes others for what takes some 0.1 ms
        encoding = self._tokenizer.encode(words, is_pretokenized=True, add_special_tokens=False)
        found: list[Ids] = [[] for _ in words]
        for at, token in zip(encoding.word_ids, encoding.ids, strict=True):
            assert at is not None, "special tokens belong to no word, and none were asked for"
            found[at].append(token)
        table.update(zip(words, found, strict=True))
        self._size += sum(1 + len(word) // _LONG for word in words)
        if self._size > MAX_WORDS:
            self._table, self._size = {}, 0  # whoever looks something up has the old one
        return True


def _pattern(pre_tokenizer: Any) -> str | None:
    """That of a split followed by bytes as letters, if it is one of _PATTERNS."""
    match json.loads(pre_tokenizer.__getstate__()):
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in _PATTERNS:
            return pattern
    return None
