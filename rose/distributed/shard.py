"""Which part of a tensor is a rank's, and which models can be divided at all. Knows sizes, no tensors."""

from typing import NamedTuple

from msgspec.structs import replace

from rose.distributed.group import Group
from rose.models.config import ModelConfig, ModelError

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class Shard(NamedTuple):
    """Entries `begin` to `end` of dimension `dim`, which has `total` in all."""

    dim: int
    total: int
    begin: int
    end: int


def share(total: int, group: Group) -> int:
    """How many of `total` entries a rank has room for; the last may have fewer of its own."""
    return -(-total // group.size)


def shard(dim: int, total: int, group: Group) -> Shard:
    """This rank's entries, in rank order."""
    each = share(total, group)
    return Shard(dim, total, min(group.rank * each, total), min((group.rank + 1) * each, total))


def check_sizes(config: ModelConfig, tensor_parallel_size: int) -> None:
    """Raises ModelError for a model that cannot be divided among so many ranks, by the size that stands against it."""
    for name in DIVIDED:
        if getattr(config, name) % tensor_parallel_size:
            raise ModelError(
                f"tensor_parallel_size {tensor_parallel_size} does not divide the model's {name}, "
                f"{getattr(config, name)}: choose one that divides {', '.join(DIVIDED)}"
            )


def local_heads(config: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """The model as one rank's attention and cache see it: with its own heads."""
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // tensor_parallel_size,
        num_key_value_heads=config.num_key_value_heads // tensor_parallel_size,
    )
