"""Language models against transformers: logits of tiny random ones, greedy tokens kept as goldens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from rose.attention.interface import Sequences
from rose.attention.sdpa import SdpaBackend
from rose.layers.kernel_layers import use_kernels
from rose.models.config import read_config
from rose.models.load import load_model
from rose.models.task import read_task
from tests.goldens import GoldenPrompt, read_goldens
from tests.rose.driving import ragged_ids
from tests.rose.tiny_lm import LLAMA3_SCALING, VOCAB_SIZE, write_llama, write_qwen3

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # of logits that spread over ten units
LENGTHS = (1, 7, 120, 2, 33)


class Batch(NamedTuple):
    input_ids: Tensor
    positions: Tensor


def load(directory: Path) -> Any:
    config = read_config(directory)
    return load_model(directory, config, read_task(directory, config), CPU, torch.float32)


@torch.inference_mode()
def logits(model: Any, sequences: list[list[int]], first: int = 0) -> Tensor:
    """Of every token from `first` on, [T, V]: whole sequences, nothing cached."""
    lengths = [len(sequence) for sequence in sequences]
    ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32)
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    attend = SdpaBackend().ragged(Sequences(offsets, torch.tensor(offsets, dtype=torch.int32)))
    return model.logits(model(Batch(ids, positions), attend)[first:])


@torch.inference_mode()
def reference_logits(directory: Path, sequences: list[list[int]]) -> Tensor:
    model = hf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return torch.cat([model(input_ids=torch.tensor([sequence])).logits[0] for sequence in sequences])


def check_golden(model: nn.Module, prompt: GoldenPrompt) -> None:
    """Given all before, each of the golden's tokens is the likeliest, as likely as it was, and leads by as much."""
    rows = logits(model, [prompt.prompt_ids + prompt.tokens[:-1]], first=len(prompt.prompt_ids) - 1)
    prompt.check(rows.argmax(-1).tolist())
    chosen = rows.log_softmax(-1).gather(1, torch.tensor(prompt.tokens)[:, None])[:, 0]
    torch.testing.assert_close(chosen, torch.tensor(prompt.logprobs), atol=2e-4, rtol=0)
    first, second = rows.topk(2).values.T
    torch.testing.assert_close(first - second, torch.tensor(prompt.margins), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("write", "changes"),
    [
        (write_llama, {}),
        (write_llama, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "tie_word_embeddings": True}),
        (write_llama, {"rope_scaling": None, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        (write_llama, {"num_key_value_heads": 4, "head_dim": 32}),
        (write_llama, {"rope_scaling": LLAMA3_SCALING | {"original_max_position_embeddings": 512, "factor": 8.0}}),
        (write_qwen3, {}),
        (write_qwen3, {"tie_word_embeddings": False, "attention_bias": True}),
    ],
    ids=["llama3", "linear, tied", "biases, one kv head", "no groups", "far llama3", "qwen3", "qwen3 untied"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, write: Callable[..., Path], changes: dict[str, Any]) -> None:
    write(tmp_path, **changes)
    sequences = ragged_ids(VOCAB_SIZE, LENGTHS)
    expected = reference_logits(tmp_path, sequences)
    model = load(tmp_path)
    got = logits(model, sequences)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits(model, sequences[1:2]), expected[1:8], atol=TOLERANCE, rtol=0)  # alone


def test_scaling_changes_what_it_should(tmp_path: Path) -> None:
    """The tests above would not see a scaling that does nothing."""
    sequences = ragged_ids(VOCAB_SIZE, (120,))
    plain = logits(load(write_llama(tmp_path / "plain", rope_scaling=None)), sequences)
    assert (logits(load(write_llama(tmp_path / "scaled")), sequences) - plain).abs().max() > 0.5


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3"])
def test_greedy_tokens_of_tiny_models(tmp_path: Path, name: Any) -> None:
    model = load({"tiny_llama": write_llama, "tiny_qwen3": write_qwen3}[name](tmp_path))
    for prompt in read_goldens(name):
        check_golden(model, prompt)


def test_greedy_tokens_of_smollm2(smollm2_dir: Path) -> None:
    """The real default model, from its GGUF file."""
    model = load(smollm2_dir)
    prompts = read_goldens("smollm2")
    assert len(prompts) >= 12
    for prompt in prompts:
        check_golden(model, prompt)


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    tied = load(write_qwen3(tmp_path / "tied"))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = load(write_llama(tmp_path / "untied"))
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("write", [write_llama, write_qwen3])
def test_kernels_give_the_same(tmp_path: Path, write: Callable[..., Path]) -> None:
    model = load(write(tmp_path))
    sequences = ragged_ids(VOCAB_SIZE, (5, 9))
    expected = logits(model, sequences)
    use_kernels(model)
    torch.testing.assert_close(logits(model, sequences), expected, atol=TOLERANCE, rtol=0)


def test_other_dtypes_come_close(tmp_path: Path) -> None:
    config = read_config(write_llama(tmp_path))
    half = load_model(tmp_path, config, read_task(tmp_path, config), CPU, torch.bfloat16)
    sequences = ragged_ids(VOCAB_SIZE, (40,))
    got, expected = logits(half, sequences), logits(load(tmp_path), sequences)
    assert got.dtype == torch.float32
    assert torch.cosine_similarity(got, expected).min() > 0.995
    assert half.model.rotary.cos.dtype == torch.float32
