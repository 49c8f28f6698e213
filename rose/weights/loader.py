"""Streams a model's weight files into its parameters, one tensor at a time. Strict: nothing missing, nothing over.

A rank reads its part of each tensor and no more of safetensors; of GGUF, whose blocks must be turned into numbers
first, it keeps its part; of random weights it makes its part, on its device.

What it asks of a model (class or instance attributes): `fused` {our module: the file's modules, stacked}, `prefixes`
that file names may carry, `unused` beginnings of names to leave alone, `tied` {parameter: the one it copies}.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rose.distributed.shard import Shard
from rose.layers.linear import FusedLinear, RowsLinear
from rose.models.config import ModelError, read_as
from rose.models.files import WeightIndex
from rose.weights.random import read_random, stream_random
from rose.weights.random_file import FILE_NAME as RANDOM_FILE

_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of layer norms in files from before 2019
_COMPUTED = (".rotary_emb.inv_freq",)  # ends of names of buffers that old files hold
_MAX_NAMED = 8  # tensors named in an error


def weight_files(directory: Path) -> list[Path]:
    """The model's safetensors files, one or those an index names, else its GGUF file or the one that random weights are
    made from. Raises ModelError."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    others = [directory / name for name in ("model.gguf", RANDOM_FILE) if (directory / name).exists()]
    if index.exists():
        files = [directory / name for name in sorted(set(read_as(index, WeightIndex).weight_map.values()))]
    elif others and not single.exists():
        return others[:1]
    else:
        files = [single]
    for file in files:
        if not file.exists():
            raise ModelError(f"{file} is missing: fetch the model again, as safetensors or as model.gguf")
    return files


def load_weights(model: nn.Module, files: list[Path], *, left_out: tuple[str, ...] = ()) -> None:
    """Fills every parameter of `model` from `files`, converting to its dtype and device. `left_out`: beginnings of more
    names to leave alone. Raises ModelError."""
    target = _Target(model, left_out)
    for file in files:
        try:
            for name, stored in _stream(file, target.wants):
                target.load(name, stored, file)
        except SafetensorError as error:
            raise ModelError(f"{file} is damaged ({error}): fetch the model again") from None
    target.check_complete(files[0].parent)


def tensor_names(file: Path) -> list[str]:
    """Of all tensors in a safetensors file, or in one of random weights. Raises ModelError."""
    try:
        if file.name == RANDOM_FILE:
            return list(read_random(file).tensors)
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged ({error}): fetch the model again, as safetensors") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from None


class Stored(Protocol):
    """A tensor of a file, to be had in part."""

    shape: tuple[int, ...]

    def fill(self, place: Tensor, shard: Shard | None) -> None:
        """Writes the whole, or the entries of `shard`, into `place`, in its dtype and on its device."""

    def rows(self, rows: Sequence[int], like: Tensor) -> Tensor:
        """A few rows [len(rows), ...] for a place on the device and in the dtype of `like`."""


class _Stored:
    """What has its numbers in a file."""

    def __init__(self, source: Any, shape: Sequence[int]) -> None:
        self._source = source
        self.shape = tuple(shape)

    def fill(self, place: Tensor, shard: Shard | None) -> None:
        place.copy_(self.read(shard))

    def rows(self, rows: Sequence[int], like: Tensor) -> Tensor:
        return torch.cat([self._source[row : row + 1] for row in rows])

    def read(self, shard: Shard | None) -> Tensor:
        if shard is None:
            return self._source[...]
        begin, end = shard.begin, shard.end
        return self._source[begin:end] if shard.dim == 0 else self._source[:, begin:end]


def _stream(file: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Stored]]:
    if file.name == RANDOM_FILE:
        yield from ((name, stored) for name, stored in stream_random(file) if wanted(name))
        return
    if file.suffix == ".gguf":
        from rose.weights.gguf import stream_gguf  # others need not wait for its import

        for name, tensor in stream_gguf(file, wanted):
            yield name, _Stored(tensor, tensor.shape)
        return
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            if wanted(name):
                stored = tensors.get_slice(name)
                yield name, _Stored(stored, stored.get_shape())


class _Target:
    """A model being filled: which parameter, or which part of a fused one, a file's tensor goes to."""

    def __init__(self, model: nn.Module, left_out: tuple[str, ...]) -> None:
        self._prefixes: tuple[str, ...] = getattr(model, "prefixes", ())
        self._unused: tuple[str, ...] = (*getattr(model, "unused", ()), *left_out)
        self._copies = {source: name for name, source in getattr(model, "tied", {}).items()}
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._parts = {
            part: (fused, index)
            for fused, parts in getattr(model, "fused", {}).items()
            for index, part in enumerate(parts)
        }
        self._missing: set[tuple[str, int]] = set()
        for name in self._parameters:
            owner = self._owner(name)
            num_parts = len(owner.sizes) if isinstance(owner, FusedLinear) else 1
            self._missing.update((name, part) for part in range(num_parts))

    def wants(self, name: str) -> bool:
        return not name.endswith(_COMPUTED) and not any(form.startswith(self._unused) for form in self._forms(name))

    def load(self, name: str, stored: Stored, file: Path) -> None:
        """Copies one tensor to where it belongs. Raises ModelError if there is no such place or shape."""
        for form in self._forms(name):
            place, index = self._place(form)
            if place in self._parameters:
                self._copy(place, index, stored, f"{file}: {name}")
                self._copy_tied(place, stored, f"{file}: {name}")
                return
        raise ModelError(f"{file} holds {name!r}, which this architecture does not have")

    def check_complete(self, directory: Path) -> None:
        if self._missing:
            names = sorted({name for name, _ in self._missing})
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            raise ModelError(f"{directory}: the weights lack {', '.join(names[:_MAX_NAMED])}{more}")

    def _forms(self, name: str) -> list[str]:
        """`name` as it stands and without each known prefix, old spellings renewed."""
        path, _, last = name.rpartition(".")
        name = f"{path}.{_OLD_NAMES.get(last, last)}" if path else name
        return [name, *(name.removeprefix(prefix) for prefix in self._prefixes if name.startswith(prefix))]

    def _place(self, name: str) -> tuple[str, int]:
        """(our parameter, part of it) for a name of the file."""
        components = name.split(".")
        if len(components) >= 2 and components[-2] in self._parts:
            components[-2], index = self._parts[components[-2]]
            return ".".join(components), index
        return name, 0

    def _copy_tied(self, name: str, stored: Stored, what: str) -> None:
        """The same tensor for a parameter that copies `name`; nothing to do where both are one."""
        copy = self._copies.get(name)
        if copy is None or (copy, 0) not in self._missing:
            return
        if self._parameters[copy] is self._parameters[name]:
            self._missing.discard((copy, 0))
        else:
            self._copy(copy, 0, stored, what)

    @torch.no_grad()
    def _copy(self, name: str, index: int, stored: Stored, what: str) -> None:
        module, parameter = self._owner(name), self._parameters[name]
        place = module.part(parameter, index) if isinstance(module, FusedLinear) else parameter
        find_shard = getattr(module, "shard", None)
        shard: Shard | None = None if find_shard is None else find_shard(name.rpartition(".")[2], index)
        expected = list(place.shape)
        if shard is not None:
            expected[shard.dim] = shard.total
        if isinstance(module, RowsLinear):
            expected[0] = max(stored.shape[0], *(row + 1 for row in module.rows))
        if list(stored.shape) != expected:
            raise ModelError(f"{what} has shape {list(stored.shape)}, expected {expected}")
        if isinstance(module, RowsLinear):
            place.copy_(stored.rows(module.rows, place))
        elif shard is None:
            stored.fill(place, None)
        else:
            count = shard.end - shard.begin
            place.narrow(shard.dim, count, place.shape[shard.dim] - count).zero_()
            if count:
                stored.fill(place.narrow(shard.dim, 0, count), shard)
        self._missing.discard((name, index))

    def _owner(self, name: str) -> nn.Module:
        return self._modules[name.rpartition(".")[0]]
