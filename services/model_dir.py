"""Whether a directory holds a whole model. Knows which files there must be, nothing of what is in them."""

import json
from pathlib import Path, PurePosixPath

from rose.weights.random_file import FILE_NAME as RANDOM_FILE
from services.source_names import SourceError


def check_model_dir(directory: Path) -> None:
    """Raises SourceError unless `directory` holds a readable config.json, a tokenizer and all weights."""
    config = directory / "config.json"
    if not config.is_file():
        raise SourceError(f"{directory} has no config.json: it is not a model directory in Hugging Face layout")
    try:
        json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
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
    """The safetensors files the model consists of, or its model.gguf, or what random weights are made from; those an
    index names may be missing."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            return [directory / PurePosixPath(name).name for name in sorted(names)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(f"{index} is not an index of safetensors files: {error!r}") from None
    for pattern in ("*.safetensors", "model.gguf", RANDOM_FILE):
        if files := sorted(directory.glob(pattern)):
            return files
    hint = ""
    if others := sorted(path.name for path in directory.glob("*.gguf")):
        hint = f" (it has {others[0]}: name that file itself as the source)"
    elif others := sorted(path.name for path in directory.glob("*.bin")):
        hint = f" (it has {others[0]}: pickled weights are never loaded, convert them first)"
    raise SourceError(f"{directory} has no *.safetensors weights{hint}")
