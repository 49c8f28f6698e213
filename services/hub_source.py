"""A model from the Hugging Face hub: safetensors repositories as they are, of GGUF repositories the one file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.model_dir import check_model_dir
from services.source_names import HubSource, Progress, SourceError
from services.wheel_source import DATA_PATTERNS

IGNORED_PATTERNS = ("*.py", "*.bin", "onnx/*", "openvino/*", "original/*", "consolidated*")


def fetch_hub(source: HubSource, cache_dir: Path, refresh: bool, say: Progress) -> Path:
    """The snapshot's directory, or the path of the GGUF file in it. Raises SourceError."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not refresh:
        try:
            return _find(source, cache_dir, local_files_only=True)
        except (LocalEntryNotFoundError, SourceError):
            pass  # not here yet, or half of it
    say(f"fetching {source.repository} from the hub")
    with _explained(source):
        return _find(source, cache_dir, local_files_only=False)


def _find(source: HubSource, cache_dir: Path, *, local_files_only: bool) -> Path:
    file = source.file
    if file is None:
        directory = _download(source, cache_dir, DATA_PATTERNS, local_files_only)
        if any(directory.glob("*.safetensors")):
            if local_files_only:
                check_model_dir(directory)
            return directory
        file = _only_gguf(source, directory, local_files_only)
        if file is None:  # neither kind of weights: the check of the directory says so
            return directory
    path = _download(source, cache_dir, (file,), local_files_only) / file
    if not path.is_file():
        raise SourceError(f"hf:{source.repository} has no file {file!r}")
    return path


def _download(source: HubSource, cache_dir: Path, patterns: tuple[str, ...], local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    path = snapshot_download(
        source.repository,
        revision=source.revision,
        cache_dir=cache_dir / "hub",
        allow_patterns=list(patterns),
        ignore_patterns=list(IGNORED_PATTERNS),
        local_files_only=local_files_only,
    )
    return Path(path)


def _only_gguf(source: HubSource, directory: Path, local_files_only: bool) -> str | None:
    """The repository's only GGUF file, None if it has none. Raises SourceError if there are several."""
    if local_files_only:  # what was fetched before
        files = [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*.gguf"))]
    else:
        from huggingface_hub import HfApi

        names = HfApi().list_repo_files(source.repository, revision=source.revision)
        files = sorted(name for name in names if name.endswith(".gguf"))
    if len(files) > 1:
        raise SourceError(
            f"hf:{source.repository} has several GGUF files: add # and one of {', '.join(files[:40])} to the source"
        )
    return files[0] if files else None


@contextmanager
def _explained(source: HubSource) -> Iterator[None]:
    """Turns the hub's errors into a SourceError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = source.repository
    try:
        yield
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
