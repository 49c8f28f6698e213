"""Draft heads from files: names as they are published, what does not go with a target, what a head computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from ipc.types import ModelFacts
from rose.layers.kernel_layers import use_kernels
from rose.models.config import ModelError, read_config
from rose.models.load import load_model
from rose.models.task import GenerateTask
from rose.speculation.heads import DraftHead, HeadKind, load_head
from rose.speculation.protocol import Target
from tests.rose.speculation.checked import attend, positions_of
from tests.rose.speculation.heads_random import write_random_head
from tests.rose.tiny_lm import write_llama, write_qwen3

KINDS = ["mtp", "eagle"]


@pytest.fixture(params=[write_llama, write_qwen3], ids=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    directory = request.param(tmp_path / "target")
    config, device = read_config(directory), torch.device("cpu")
    model = load_model(directory, config, GenerateTask(()), device, torch.float32)
    facts = ModelFacts(
        name="tiny", architecture="tiny", task="generate", vocab_size=320, max_model_len=512, dimension=1,
        max_num_seqs=1, max_num_batched_tokens=16,
    )  # fmt: skip
    return Target(model, config, directory, facts, torch.float32, device)


def inputs() -> Tensor:
    """Embeddings and hidden states of seven tokens."""
    return torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(5))


def outputs(head: DraftHead) -> Tensor:
    embedding, hidden = inputs()
    return head(embedding, hidden, positions_of(hidden), attend)


def rename(directory: Path, prefix: str, strip: str = "", extra: tuple[str, ...] = ()) -> None:
    tensors = load_file(directory / "model.safetensors")
    renamed = {prefix + name.removeprefix(strip): tensor for name, tensor in tensors.items()}
    save_file(renamed | {name: torch.zeros(320, 64) for name in extra}, directory / "model.safetensors")


def test_the_names_of_deepseeks_checkpoints(target: Target, tmp_path: Path) -> None:
    directory = write_random_head(tmp_path / "head", target.directory, "mtp")
    expected = outputs(load_head(directory, target)[0])
    copies = ("model.layers.61.embed_tokens.weight", "model.layers.61.shared_head.head.weight")
    rename(directory, "model.layers.61.", extra=copies)
    torch.testing.assert_close(outputs(load_head(directory, target)[0]), expected, rtol=0, atol=0)


def test_the_names_of_eagles_checkpoints(target: Target, tmp_path: Path) -> None:
    """`fc` stands outside of the layer and may have a bias."""
    directory = write_random_head(tmp_path / "head", target.directory, "eagle")
    tensors = load_file(directory / "model.safetensors")
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight"} < set(tensors)
    assert not {"layers.0.input_layernorm.weight", "norm.weight"} & set(tensors)
    plain = outputs(load_head(directory, target)[0])
    more = {"embed_tokens.weight": torch.zeros(320, 64), "fc.bias": torch.zeros(64)}
    save_file(tensors | more, directory / "model.safetensors")
    torch.testing.assert_close(outputs(load_head(directory, target)[0]), plain, rtol=0, atol=0)
    save_file(tensors | more | {"fc.bias": torch.ones(64)}, directory / "model.safetensors")
    assert not torch.allclose(outputs(load_head(directory, target)[0]), plain, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_by_hand(target: Target, tmp_path: Path, kind: HeadKind) -> None:
    """At the first position attention is the value itself, and nothing is turned."""
    directory = write_random_head(tmp_path / "head", target.directory, kind)
    stored = {name.removeprefix("layers.0."): x for name, x in load_file(directory / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(6)
    embedding, hidden = torch.randn(2, 1, 64, generator=generator)

    def norm(x: Tensor) -> Tensor:  # its weight is one
        return x * (x.square().mean(-1, keepdim=True) + target.config.norm_eps).rsqrt()

    def product(x: Tensor, name: str) -> Tensor:
        return F.linear(x, stored[name + ".weight"])

    is_mtp = kind == "mtp"
    both = [norm(x) if is_mtp else x for x in (embedding, hidden)]
    x = product(torch.cat(both, -1), "eh_proj" if is_mtp else "fc")
    value = product(norm(x) if is_mtp else x, "self_attn.v_proj").view(2, 16).repeat_interleave(2, 0).view(1, 64)
    x = x + product(value, "self_attn.o_proj")
    gate, up = (product(norm(x), f"mlp.{name}_proj") for name in ("gate", "up"))
    x = x + product(F.silu(gate) * up, "mlp.down_proj")
    found = load_head(directory, target)[0](embedding, hidden, positions_of(hidden), attend)
    torch.testing.assert_close(found, norm(x) if is_mtp else x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, the target's is 64"),
        ({"vocab_size": 300}, "vocab_size is 300, the target's is 320"),
        ({"max_position_embeddings": 511}, "has 511 positions"),
    ],
)
def test_heads_of_other_models(target: Target, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = write_random_head(tmp_path / "head", target.directory, "mtp", **changes)
    with pytest.raises(ModelError, match=message):
        load_head(directory, target)


def test_files_that_are_no_head(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="several layers"):
        load_head(target.directory, target)
    directory = write_random_head(tmp_path / "head", target.directory, "mtp")
    tensors = load_file(directory / "model.safetensors")
    del tensors["hnorm.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"the weights lack hnorm\.weight"):
        load_head(directory, target)
    tensors |= {f"layers.{index}.hnorm.weight": torch.ones(64) for index in (1, 2)}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"several layers \(layers\.1\., layers\.2\.\)"):
        load_head(directory, target)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_by_kernels(target: Target, tmp_path: Path, kind: HeadKind) -> None:
    """As a GPU runs it, in Triton's interpreter where there is none."""
    head = load_head(write_random_head(tmp_path / "head", target.directory, kind), target)[0]
    expected = outputs(head)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = head.to(device)
    use_kernels(head)
    embedding, hidden = inputs().to(device)
    found = head(embedding, hidden, positions_of(hidden).to(device), attend)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
