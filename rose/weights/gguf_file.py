"""The container of GGUF files: metadata, and tensors as views of the mapped file. Knows no model.

Written anew because the gguf package takes seconds to index a tokenizer's arrays, which are skipped here. Layout,
little-endian, strings as length and UTF-8 bytes:

    "GGUF" version:u32 num_tensors:u64 num_pairs:u64
    pairs:    key:string type:u32 value
    tensors:  name:string num_dims:u32 dims:u64[num_dims] (fastest first) type:u32 offset:u64
    padding to the alignment, then the data that offsets count from
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from rose.models.config import ModelError

_VERSIONS = (2, 3)
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # struct's letters by type
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


class GgufTensor(NamedTuple):
    name: str
    kind: GGMLQuantizationType
    data: NDArray[np.uint8]  # the bytes of each row, [..., bytes of a row], read-only


class GgufFile:
    """`metadata` has numbers, flags and strings; arrays are left out. Raises ModelError for what is no whole file."""

    def __init__(self, path: Path) -> None:
        self._at = 0
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = self._read()
        except (ValueError, OverflowError, struct.error) as error:  # what wrong bytes, or none, lead to
            raise ModelError(f"{path} is damaged or no GGUF file ({error}): fetch the model again") from None

    def _read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        magic, version, num_tensors, num_pairs = self._take("4sIQQ")
        if magic != b"GGUF" or version not in _VERSIONS:
            raise ValueError(f"it begins with {magic!r}, version {version}")
        metadata = {}
        for _ in range(num_pairs):
            key = self._string()
            value = self._value(*self._take("I"))
            if value is not None:
                metadata[key] = value
        places = [self._place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = self._at + -self._at % alignment
        return metadata, [self._tensor(start, *place) for place in places]

    def _value(self, kind: int) -> Any:
        """The value at the cursor; None for an array, which is skipped."""
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        item, length = self._take("IQ")
        if item in _SCALARS:
            self._at += length * struct.calcsize(_SCALARS[item])
        elif item == _STRING:
            for _ in range(length):
                (num_bytes,) = self._take("Q")
                self._at += num_bytes
        else:
            raise ValueError(f"an array has items of type {item}")
        return None

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, type, offset) of the next tensor."""
        name = self._string()
        (num_dims,) = self._take("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"{name} has {num_dims} dimensions")
        shape = self._take(f"{num_dims}Q")[::-1]
        return name, shape, *self._take("IQ")

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if shape[-1] % block_size:
            raise ValueError(f"rows of {name} have {shape[-1]} values, in blocks of {block_size}")
        row_bytes = shape[-1] // block_size * block_bytes
        first, num_bytes = start + offset, math.prod(shape[:-1]) * row_bytes
        if first + num_bytes > len(self._bytes):
            raise ValueError(f"it ends within {name}")
        data = np.frombuffer(self._bytes, np.uint8, num_bytes, first)
        return GgufTensor(name, GGMLQuantizationType(kind), data.reshape(*shape[:-1], row_bytes))

    def _string(self) -> str:
        (length,) = self._take("Q")
        if length > len(self._bytes) - self._at:
            raise ValueError("it ends within a string")
        text = self._bytes[self._at : self._at + length].decode()
        self._at += length
        return text

    def _take(self, letters: str) -> tuple[Any, ...]:
        """Values at the cursor, which moves past them."""
        layout = struct.Struct("<" + letters)
        values = layout.unpack_from(self._bytes, self._at)
        self._at += layout.size
        return values
