"""Draft heads from files: names as they are published, what does not go with a target, what a head computes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ipc.types import ModelFacts
from rose.config import SpeculationConfig
from rose.distributed.group import Group
from rose.distributed.shard import local_heads
from rose.kv_cache import KVShape
from rose.layers.kernel_layers import use_kernels
from rose.models.config import ModelError, read_config
from rose.models.llama import LlamaForCausalLM
from rose.models.load import load_model
from rose.models.task import GenerateTask
from rose.speculation.checks import check_proposer
from rose.speculation.heads import DraftHead, HeadKind, is_head, load_head
from rose.speculation.mtp import load_ends
from rose.speculation.protocol import Target
from rose.speculation.registry import load_proposer
from services.sources import resolve_source
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


@pytest.mark.parametrize("name", ["model.safetensors", "model.random.json"])
def test_weights_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ModelError, match=f"{name} cannot be read: "):
        is_head(tmp_path)


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


def of_two(target: Target) -> list[Target]:
    """As each of two ranks sees it, that say nothing to each other."""
    groups = [SimpleNamespace(rank=rank, size=2, leads=rank == 0) for rank in range(2)]
    config = local_heads(target.config, 2)
    return [target._replace(model=nn.Identity(), config=config, group=cast(Group, group)) for group in groups]


def test_a_head_that_the_leader_has_alone(target: Target, tmp_path: Path) -> None:
    """Whole, over all heads of keys and values, with a part of the target's head where some tokens are drafted."""
    head = write_random_head(tmp_path / "head", target.directory, "mtp")
    config = SpeculationConfig(proposer="mtp", model=str(head), head_ranks="leader", draft_vocab=40)
    leader, other = (each._replace(dtype=torch.float16) for each in of_two(target))  # neither packed nor transposed
    source = cast(Any, load_proposer(config, leader))
    assert source.kv_shape == KVShape(1, 2, 16, torch.float16)
    assert load_proposer(config, other).kv_shape is None
    model, is_tied = cast(LlamaForCausalLM, target.model), target.config.tie_word_embeddings
    embedding, rows = source._target.embed_tokens.weight, source._logits._rows
    assert torch.equal(embedding, model.model.embed_tokens.weight.half())
    assert torch.equal(rows, model.lm_head.weight[:40].half())
    assert (rows.data_ptr() == embedding.data_ptr()) == is_tied
    if not is_tied:
        assert rows.untyped_storage().nbytes() == 40 * 64 * 2  # the others are gone
    on_cpu = cast(Any, load_proposer(config, leader._replace(dtype=torch.float32)))._logits._rows
    assert torch.equal(on_cpu, model.lm_head.weight[:40])
    assert on_cpu.untyped_storage().nbytes() == 40 * 64 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_ends_of_a_target_are_whole(target: Target, tmp_path: Path, dtype: torch.dtype) -> None:
    made = resolve_source("random:tiny", tmp_path)
    for directory in (target.directory, made):
        config, device = read_config(directory), torch.device("cpu")
        whole = cast(LlamaForCausalLM, load_model(directory, config, GenerateTask(()), device, dtype))
        given = target._replace(directory=directory, config=config, dtype=dtype)
        ends = cast(LlamaForCausalLM, load_ends(of_two(given)[0]))
        ids, hidden = torch.arange(config.vocab_size), torch.randn(3, config.hidden_size).to(dtype)
        assert torch.equal(ends.model.embed_tokens(ids), whole.model.embed_tokens(ids))
        torch.testing.assert_close(ends.logits(hidden), whole.logits(hidden))
        if config.tie_word_embeddings and dtype == torch.float16:  # of float32 the head is another for a CPU
            assert ends.lm_head.weight.data_ptr() == ends.model.embed_tokens.weight.data_ptr()
        assert not len(ends.model.layers)


def test_which_heads_may_be_on_which_ranks(target: Target, tmp_path: Path) -> None:
    """One whose own heads two ranks cannot divide may be the leader's, and some tokens drafted by it alone."""
    odd = write_random_head(tmp_path / "odd", target.directory, "mtp", num_attention_heads=3, num_key_value_heads=1)
    config = SpeculationConfig(proposer="mtp", model=str(odd), draft_vocab=40)
    leader = of_two(target)[0]
    with pytest.raises(ModelError, match="tensor_parallel_size 2 does not divide the model's num_attention_heads, 3"):
        load_proposer(config, leader)
    assert load_proposer(replace(config, head_ranks="leader"), leader).kv_shape == KVShape(1, 1, 16, torch.float32)
    even = write_random_head(tmp_path / "even", target.directory, "mtp")
    facts = replace(target.facts, tensor_parallel_size=2)
    config = replace(config, model=str(even))
    with pytest.raises(ModelError, match=r'each with a part of the vocabulary: .* speculation\.head_ranks = "leader"'):
        check_proposer(config, target.config, facts, target.directory)
    check_proposer(replace(config, head_ranks="leader"), target.config, facts, target.directory)


@pytest.mark.parametrize("proposer", ["none", "n_gram", "draft_model"])
def test_others_have_no_head_to_be_on_a_rank(target: Target, proposer: Any) -> None:
    config = SpeculationConfig(proposer=proposer, num_layers=1, head_ranks="leader")
    with pytest.raises(ModelError, match=f'head_ranks = "leader" is for draft heads.* the proposer is {proposer}: rem'):
        load_proposer(config, target)
