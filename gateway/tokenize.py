"""Text to token ids. Knows tokenizer.json and nothing of models, prompts or requests.

Texts are encoded without special tokens and framed afterwards with the tokens that the tokenizer's own
post-processor would put around them, which is the same thing and lets a query be encoded once for many
documents. The file's truncation and padding are switched off; text that spells a special token is plain text.
"""

import json
import re
import unicodedata
from pathlib import Path

from msgspec import Struct
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from gateway.known_words import KnownWords

# Text is cut before it is encoded at this many characters per wanted token, and again at four times as many
# when that was too little; no text is cut twice in vain, and a book costs what its first page costs.
CUT_CHARS_PER_TOKEN = 12
CUT_MARGIN_TOKENS = 8
# Where there is no such place, as in Chinese without punctuation, the cut falls anywhere and only the ids well before
# it count. WordPiece goes word by word, and one has 100 ids at most; BPE feels a cut for a few pieces. Unigram feels it
# as far as a word goes, for it takes the likeliest of all divisions of a word: it is cut only where words end.
CUT_INSIDE_MARGIN_TOKENS = 128
CUT_SEARCH_CHARS = 1000
_SPACES = " \n\t\r\u00a0\u3000"
KNOWN_WORDS_CHARS = 4000  # of a call, up to which words are looked up: more would keep other threads from running
_PROBES = ("a", "b", "the", "1")


class TokenizerError(ValueError):
    """A tokenizer.json that cannot be used; the text says why."""


class Frame(Struct, frozen=True):
    """What stands around one sequence, or around and between two."""

    prefix: list[int]
    middle: list[int]
    suffix: list[int]
    type_start: int | None = None  # pairs: where type 1 begins, counted from the end of the first sequence

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)


class TextTokenizer:
    """One model's tokenizer; may be called from several threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.single = _single_frame(tokenizer)
        self.pair = _pair_frame(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self.original = tokenizer  # for decoding
        if isinstance(tokenizer.model, Unigram):
            tokenizer = _without_special_pieces(tokenizer, set(self._special))
        tokenizer.encode_special_tokens = True  # text is text
        self._tokenizer = tokenizer
        self._inner = _without_first_space(tokenizer) or tokenizer
        self._known_words = KnownWords.of(tokenizer)
        self._word_end = _word_end(tokenizer) if isinstance(tokenizer.model, Unigram) else None

    @classmethod
    def from_file(cls, path: Path) -> "TextTokenizer":
        """Raises TokenizerError."""
        try:
            return cls(Tokenizer.from_file(str(path)))
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            raise TokenizerError(f"{path} cannot be read: {error}") from None

    def special_ids(self, text: str) -> list[int]:
        """Ids of a template's text, in which special tokens are spelled out."""
        ids: list[int] = []
        names = sorted(self._special, key=len, reverse=True)
        for part in re.split("|".join(f"({re.escape(name)})" for name in names), text) if names else [text]:
            if part in self._special:
                ids.append(self._special[part])
            elif part:
                ids += (self.encode_inner if ids else self.encode)([part])[0]
        return ids

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        known = self._known_words
        if known is None or sum(map(len, texts)) > KNOWN_WORDS_CHARS:
            return _library_ids(self._tokenizer, texts)
        found = [known.encode(text) for text in texts]
        left = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        rest = iter(_library_ids(self._tokenizer, left))
        return [next(rest) if ids is None else ids for ids in found]

    def is_quick(self, text: str) -> bool:
        """Whether `encode` looks a text's words up, if it is short."""
        return self._known_words is not None and self._known_words.takes(text)

    def encode_inner(self, texts: list[str]) -> list[list[int]]:
        """As `encode`, of texts that have something before them: no space is put before the first word."""
        return _library_ids(self._inner, texts)

    def encode_cut(self, texts: list[str], num_tokens: int) -> list[list[int]]:
        """As `encode`, each cut to its first `num_tokens` ids, without encoding what will be cut off."""
        result: list[list[int]] = [[]] * len(texts)
        pending = list(range(len(texts)))
        num_chars = CUT_CHARS_PER_TOKEN * (num_tokens + CUT_MARGIN_TOKENS)
        while pending:
            cuts = [self._cut(texts[i], num_chars) for i in pending]
            again = []
            for i, (piece, margin), ids in zip(pending, cuts, self.encode([piece for piece, _ in cuts]), strict=True):
                if len(piece) == len(texts[i]) or len(ids) >= num_tokens + margin:
                    result[i] = ids[:num_tokens]
                else:
                    again.append(i)
            pending = again
            num_chars *= 4
        return result

    def _cut(self, text: str, num_chars: int) -> tuple[str, int]:
        """`text` without what lies beyond about `num_chars`, and how many of its last ids the cut may have changed."""
        if self._word_end is not None:
            return _cut_at(self._word_end, text, num_chars), CUT_MARGIN_TOKENS
        piece = cut_text(text, num_chars)
        return (text[:num_chars], CUT_INSIDE_MARGIN_TOKENS) if piece is None else (piece, CUT_MARGIN_TOKENS)

    def frame(self, ids: list[int]) -> list[int]:
        return self.single.prefix + ids + self.single.suffix

    def frame_pair(self, first: list[int], second: list[int]) -> tuple[list[int], int]:
        """The joined ids, and where type 1 begins in them (their length if nowhere)."""
        frame = self.pair
        joined = frame.prefix + first + frame.middle + second + frame.suffix
        if frame.type_start is None:
            return joined, len(joined)
        return joined, len(frame.prefix) + len(first) + frame.type_start


def _library_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    if not texts:  # of a request in token ids: the call alone takes longer than all of their checks
        return []
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _word_end(tokenizer: Tokenizer) -> re.Pattern[str]:
    """What a letter or digit is followed by where the tokenizer divides a text for good; matches nothing if it never
    does."""

    def divides(space: str) -> bool:
        text = f"a{space}b"
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        return tokenizer.pre_tokenizer is not None and len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) > 1

    found = "".join(filter(divides, _SPACES))
    return re.compile(rf"(?<=[^\W_])[{re.escape(found)}]" if found else r"(?!)")


def _cut_at(place: re.Pattern[str], text: str, num_chars: int) -> str:
    """`text` up to the first such place from about `num_chars` on; all of it where there is none."""
    found = place.search(text, num_chars)
    return text if found is None else text[: found.start()]


def cut_text(text: str, num_chars: int) -> str | None:
    """`text` without what lies beyond about `num_chars`, cut where no tokenizer joins: after a letter or digit,
    before white space, or punctuation in scripts that have no spaces. None where there is no such place."""
    if len(text) <= num_chars:
        return text
    for ends_word in (str.isspace, _is_punctuation):
        for end in range(num_chars, max(num_chars - CUT_SEARCH_CHARS, 1), -1):
            if text[end - 1].isalnum() and ends_word(text[end]):
                return text[:end]
    return None


def _is_punctuation(char: str) -> bool:
    return unicodedata.category(char).startswith("P")


def longest_first(num_first: int, num_second: int, limit: int) -> tuple[int, int]:
    """How many ids of either sequence stay when both together may have `limit` (transformers' default rule)."""
    if num_first + num_second <= limit:
        return num_first, num_second
    short = min(num_first, num_second)
    long = short if short > limit else max(short, limit - short)
    if short + long > limit:
        short = limit // 2
        long = short + limit % 2
    return (short, long) if num_first <= num_second else (long, short)


def _single_frame(tokenizer: Tokenizer) -> Frame:
    for probe in _PROBES:
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        full = tokenizer.encode(probe).ids
        at = _find(full, bare)
        if bare and at is not None:
            return Frame(full[:at], [], full[at + len(bare) :])
    raise TokenizerError("its post-processor does more than put tokens around a text: not supported")


def _pair_frame(tokenizer: Tokenizer) -> Frame:
    for probe in _PROBES:
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        encoding = tokenizer.encode(probe, probe)
        full, types = encoding.ids, encoding.type_ids
        first = _find(full, bare)
        second = None if first is None else _find(full, bare, first + len(bare))
        if not bare or first is None or second is None:
            continue
        end = first + len(bare)
        type_start = types.index(1) - end if 1 in types else None
        return Frame(full[:first], full[end:second], full[second + len(bare) :], type_start)
    raise TokenizerError("its post-processor does more than put tokens around and between texts: not supported")


def _without_special_pieces(tokenizer: Tokenizer, special: set[str]) -> Tokenizer:
    """A copy in which a Unigram's pieces that spell special tokens match no text, since it holds them among its
    ordinary ones: no piece with a space inside is ever looked for. Ids stay."""
    content = json.loads(tokenizer.to_str())
    for piece in content["model"]["vocab"]:
        if piece[0] in special:
            piece[0] = f" {piece[0]} "
    return Tokenizer.from_str(json.dumps(content))


def _without_first_space(tokenizer: Tokenizer) -> Tokenizer | None:
    """A copy that puts no space before a text; None where the tokenizer does so everywhere or nowhere.

    SentencePiece's rule since Llama 2: only what begins the whole text gets one, not what follows a special token.
    """
    if tokenizer.pre_tokenizer is None:
        return None
    outer = json.loads(tokenizer.pre_tokenizer.__getstate__())
    found = [
        part
        for part in (outer, *outer.get("pretokenizers", []))
        if part["type"] == "Metaspace" and part.get("prepend_scheme") == "first"
    ]
    if not found:
        return None
    for part in found:
        part["prepend_scheme"] = "never"
    inner = Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"pre_tokenizer": outer}))
    inner.encode_special_tokens = True
    return inner


def _find(ids: list[int], part: list[int], start: int = 0) -> int | None:
    return next((i for i in range(start, len(ids) - len(part) + 1) if ids[i : i + len(part)] == part), None)
