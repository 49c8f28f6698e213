"""Which part of a model is whose, and that nothing else is read; without any process beside this one."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rose.config import RankConfig
from rose.distributed.group import ALONE
from rose.distributed.shard import Shard, shard
from rose.models.config import ModelError, read_config
from rose.models.load import load_model
from rose.models.task import read_task
from rose.runners import make_runner
from rose.weights import loader
from tests.rose.random_models import bert
from tests.rose.test_gguf import convert
from tests.rose.tiny_lm import write_llama, write_qwen3

CPU = torch.device("cpu")


class Silent(NamedTuple):
    """A rank whose group says nothing: weights do not need it."""

    rank: int
    size: int = 2

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is computed here")

    all_gather = broadcast = all_reduce


def load(directory: Path, group: object = ALONE) -> dict[str, Tensor]:
    config = read_config(directory)
    model = load_model(directory, config, read_task(directory, config), CPU, torch.float32, group)  # type: ignore[arg-type]
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_last_part_is_what_is_left() -> None:
    assert [shard(0, 7, Silent(rank, 4)) for rank in range(4)] == [
        Shard(0, 7, 0, 2), Shard(0, 7, 2, 4), Shard(0, 7, 4, 6), Shard(0, 7, 6, 7),
    ]  # fmt: skip
    assert shard(0, 5, Silent(3, 4)) == Shard(0, 5, 5, 5)  # nothing


@pytest.mark.parametrize("write", [write_llama, write_qwen3, lambda path: bert(path, num_layers=1, vocab_size=64)])
def test_parts_of_all_ranks_are_the_whole(
    tmp_path: Path, write: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads about half of what is divided, of the file too."""
    directory = write(tmp_path)
    whole, num_read = load(directory), [0]
    read = loader._Stored.read

    def counted(stored: loader._Stored, part: Shard | None) -> Tensor:
        values = read(stored, part)
        num_read[0] += values.numel()
        return values

    monkeypatch.setattr(loader._Stored, "read", counted)
    first = load(directory, Silent(0))
    num_first, num_read[0] = num_read[0], 0
    second = load(directory, Silent(1))
    assert num_first == sum(part.numel() for part in first.values())
    num_divided = 0
    for name, values in whole.items():
        parts = first[name], second[name]
        if parts[0].shape == values.shape:
            torch.testing.assert_close(parts[0], values)
            torch.testing.assert_close(parts[1], torch.zeros_like(values) if _is_summed_bias(name) else values)
            continue
        num_divided += values.numel()
        assert parts[0].numel() == parts[1].numel() == values.numel() // 2, name
        torch.testing.assert_close(torch.cat(parts).sum(), values.sum(), rtol=1e-4, atol=1e-3)
    matrices = sum(values.numel() for values in whole.values() if values.dim() == 2 and len(values) != 512)
    assert num_divided > 0.6 * matrices


def _is_summed_bias(name: str) -> bool:
    return name.endswith(("output.dense.bias", "o_proj.bias", "down_proj.bias"))


@pytest.mark.parametrize(
    ("size", "named"), [(4, "num_key_value_heads, 2"), (3, "num_attention_heads, 4"), (8, "num_attention_heads, 4")]
)
def test_a_model_that_cannot_be_divided_is_refused_by_name(tmp_path: Path, size: int, named: str) -> None:
    with pytest.raises(ModelError, match=f"tensor_parallel_size {size} does not divide the model's {named}"):
        make_runner("test", write_llama(tmp_path), RankConfig(device="cpu"), tensor_parallel_size=size)


def test_queries_stay_with_their_keys(tmp_path: Path) -> None:
    """Rank 1 has the heads behind the first half, of q, of k and of v."""
    directory = write_llama(tmp_path)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    q, k, v = load(directory)[name].split((64, 32, 32))
    torch.testing.assert_close(load(directory, Silent(1))[name], torch.cat((q[32:], k[16:], v[16:])))


def test_a_gguf_file_is_divided_alike(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    expected = load(directory, Silent(1))
    convert(directory)
    (directory / "model.safetensors").unlink(missing_ok=True)
    found = load(directory, Silent(1))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values)
