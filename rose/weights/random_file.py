"""The file that stands for weights which are made, not read: names, shapes and a seed. Knows no torch."""

from msgspec import Struct

FILE_NAME = "model.random.json"


class RandomTensor(Struct, frozen=True):
    """Normally distributed numbers."""

    shape: list[int]
    mean: float
    std: float
    row_means: dict[int, float] = {}  # of rows with another mean


class RandomWeights(Struct, frozen=True):
    """The file's content."""

    seed: int
    tensors: dict[str, RandomTensor]
