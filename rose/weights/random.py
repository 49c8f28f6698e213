"""Weights that are made, not read: a file of names, shapes and a seed (rose.weights.random_file) says them.

Numbers come in tiles of at most 1024 x 1024, each from a generator of its own, on the device they are for. So a rank
makes its part of a tensor and little more, and has what it would have of the whole. They are the same for a seed and a
kind of device; a CPU's are others.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rose.distributed.shard import Shard
from rose.models.config import ModelError
from rose.weights.random_file import RandomTensor, RandomWeights

TILE = 1024


def read_random(path: Path) -> RandomWeights:
    """Raises ModelError for a file of another kind."""
    try:
        weights = msgspec.json.decode(path.read_bytes(), type=RandomWeights)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is no file of random weights ({error}): remove it") from None
    for name, tensor in weights.tensors.items():
        if len(tensor.shape) not in (1, 2):
            raise ModelError(f"{path}: {name} has {len(tensor.shape)} dimensions; only one or two are made")
    return weights


def stream_random(path: Path) -> Iterator[tuple[str, "RandomStored"]]:
    """Every tensor by its name. Raises ModelError."""
    weights = read_random(path)
    for name, tensor in weights.tensors.items():
        yield name, RandomStored(f"{weights.seed} {name}", tensor)


class RandomStored:
    """A tensor of one or two dimensions, to be made in part. `key` says which of all there are."""

    def __init__(self, key: str, tensor: RandomTensor) -> None:
        self._key, self._tensor = key, tensor
        self.shape = tuple(tensor.shape)

    def fill(self, place: Tensor, shard: Shard | None) -> None:
        """Writes the whole, or the entries of `shard`, into `place`, in its dtype and on its device."""
        place = place if place.dim() == 2 else place[:, None]
        generator = torch.Generator(place.device)
        ends = [self.shape[0], self.shape[1] if len(self.shape) == 2 else 1]
        begins = [0, 0]
        if shard is not None:
            begins[shard.dim], ends[shard.dim] = shard.begin, shard.end
        for row in range(begins[0] // TILE * TILE, ends[0], TILE):
            for column in range(begins[1] // TILE * TILE, ends[1], TILE):
                tile = self._tile(row, column, generator)
                top, left = max(begins[0] - row, 0), max(begins[1] - column, 0)
                part = tile[top : ends[0] - row, left : ends[1] - column]
                to_row, to_column = row + top - begins[0], column + left - begins[1]
                place[to_row : to_row + part.shape[0], to_column : to_column + part.shape[1]].copy_(part)

    def rows(self, rows: Sequence[int], like: Tensor) -> Tensor:
        """A few rows, on the device and in the dtype of `like`."""
        made = like.new_empty(len(rows), *self.shape[1:])
        for index, row in enumerate(rows):
            self.fill(made[index : index + 1], Shard(0, self.shape[0], row, row + 1))
        return made

    def _tile(self, row: int, column: int, generator: torch.Generator) -> Tensor:
        """float32, of the size it has in the whole tensor, whoever asks: the numbers depend on it."""
        num_rows = min(TILE, self.shape[0] - row)
        num_columns = min(TILE, self.shape[1] - column) if len(self.shape) == 2 else 1
        digest = hashlib.blake2b(f"{self._key} {row} {column}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        tile = torch.empty(num_rows, num_columns, device=generator.device, dtype=torch.float32)
        tile.normal_(self._tensor.mean, self._tensor.std, generator=generator)
        for special, mean in self._tensor.row_means.items():
            if row <= special < row + num_rows:
                tile[special - row] += mean - self._tensor.mean
        return tile
