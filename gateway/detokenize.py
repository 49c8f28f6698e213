"""Token ids to text as they come, and the exact bytes of single tokens. Knows tokenizer.json's decoders, no requests.

Every token stands for bytes that depend on nothing but whether it is the first. So decoding is a table and an
incremental UTF-8 decoder: constant time a token, and no more than three bytes kept.
"""

import codecs
import json
import re
from collections.abc import Iterable

from tokenizers import Tokenizer

from gateway.tokenize import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"  # decoders take any strings: this one stands for what came before
# of tokens that change what their neighbours become
_UNSUPPORTED = {"BPEDecoder", "CTC"}


class TokenBytes:
    """The bytes that each token of one tokenizer adds to a text. One per model, filled as tokens are met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises TokenizerError for a decoder in which a token's text depends on its neighbours."""
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder
        kinds = _decoder_kinds(tokenizer)
        if unsupported := _UNSUPPORTED & kinds:
            raise TokenizerError(f"its decoder {', '.join(unsupported)} cannot be run token by token: not supported")
        self._byte_level = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self.special_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self._first: dict[int, bytes] = {}
        self._next: dict[int, bytes] = {}

    def get(self, token_id: int, *, first: bool = False) -> bytes | None:
        """Bytes of a token, None for an id the tokenizer does not have (a model's vocabulary may be padded).
        `first`: where a text begins, at which some decoders drop a space."""
        table = self._first if first else self._next
        found = table.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return None
            found = table[token_id] = self._bytes(token, first)
        return found

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token alone, as logprobs show it: replacement characters where it is half a character, exact bytes."""
        found = self.get(token_id) or b""
        return found.decode("utf-8", "replace"), found

    def _bytes(self, token: str, first: bool) -> bytes:
        if self._byte_level is not None:
            # an added token may spell what the alphabet lacks: it is taken as it is
            values = [self._byte_level.get(char) for char in token]
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte is not None and (value := int(byte[1], 16)) >= 0x80:
            return bytes([value])
        if self._decoder is None:
            return token.encode() if first else f" {token}".encode()
        before = [] if first else [_ANCHOR]
        text: str = self._decoder.decode([*before, token])
        return text[len(self._decoder.decode(before)) :].encode()


class Detokenizer:
    """One generation's text."""

    def __init__(self, tokens: TokenBytes, *, skip_special_tokens: bool = True, starts_text: bool = True) -> None:
        """`starts_text` False: the tokens go on from a prompt whose text they are to be put behind, so that the space
        in front of a first word stays (it makes no difference for byte-level tokenizers)."""
        self._tokens = tokens
        self._skip = tokens.special_ids if skip_special_tokens else frozenset()
        self._first = starts_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that is complete with these tokens; bytes of an unfinished character wait for the next ones."""
        parts = []
        for token_id in token_ids:
            found = None if token_id in self._skip else self._tokens.get(token_id, first=self._first)
            if found is not None:
                parts.append(found)
                self._first = False
        return self._utf8.decode(b"".join(parts))

    def finish(self) -> str:
        """A replacement character if the last character is unfinished, else nothing."""
        return self._utf8.decode(b"", final=True)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    return {part["type"] for part in [decoder, *decoder.get("decoders", [])] if "type" in part}


def _byte_level_alphabet() -> dict[str, int]:
    """Which character stands for which byte in byte-level BPE (GPT-2, Radford et al. 2019): visible Latin-1
    characters for themselves, the other bytes in order as U+0100 and up."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(others)}
