"""The header of a GGUF file: its metadata, checked by type, and its tensors' shapes. Reads no weights."""

from pathlib import Path
from typing import Any, TypeVar

from gguf import GGUFReader

from services.source_names import SourceError

T = TypeVar("T", bool, int, float, str)
_BROKEN = (ValueError, KeyError, IndexError, OSError, OverflowError, TypeError, MemoryError)  # what a bad file raises


class GgufMetadata:
    """What a GGUF file says of itself. Every SourceError names the file."""

    def __init__(self, path: Path) -> None:
        """Raises SourceError for what is not a GGUF file, or not a whole one."""
        self.path = path
        try:
            reader = GGUFReader(path)
            self._values: dict[str, Any] = {
                name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
            }
            # the file's own order of dimensions is the reverse of torch's
            self.shapes = {tensor.name: tuple(int(n) for n in tensor.shape[::-1]) for tensor in reader.tensors}
        except _BROKEN as error:
            raise self.error(f"it cannot be read as a GGUF file ({error!r:.200}): fetch it again") from None
        self._tensors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"}
        if self.get("split.count", int, 1) > 1:
            raise self.error("it is one part of several: merge them first (llama-gguf-split --merge)")
        self.architecture = self.need("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value of `key`, `default` if there is none. Raises SourceError for another type."""
        value = self._values.get(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{key} is {value!r:.80} where a {kind.__name__} belongs")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        if key not in self._values:
            raise self.error(f"it has no {key}: convert the model again with a present-day converter")
        return self.get(key, kind, kind())

    def items(self, key: str, kind: type[T]) -> list[T]:
        """The array `key`; empty if there is none."""
        values = self._values.get(key, [])
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise self.error(f"{key} is no array of {kind.__name__}")
        return values

    def size(self, name: str) -> int:
        """`need` of one of the architecture's own sizes, such as `block_count`."""
        value = self.need(f"{self.architecture}.{name}", int)
        if value < 1:
            raise self.error(f"{self.architecture}.{name} is {value}")
        return value

    def floats(self, tensor: str) -> list[float] | None:
        """The values of a small float32 tensor, None if there is none."""
        return None if (data := self._tensors.get(tensor)) is None else [float(value) for value in data.reshape(-1)]

    def error(self, text: str) -> SourceError:
        return SourceError(f"{self.path}: {text}")
