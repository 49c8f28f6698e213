"""GGUF files written by the gguf package, as llama.cpp's converter lays them out, read back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from rose.models.config import ModelError, read_config
from rose.models.load import load_model
from rose.models.task import read_task
from rose.weights.gguf import halves_of_heads, hugging_face_name, stream_gguf
from rose.weights.gguf_file import GgufFile
from rose.weights.loader import weight_files
from tests.rose.tiny_lm import write_llama, write_qwen3

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    path, _, kind = name.rpartition(".")
    if not path.startswith("model.layers."):
        return f"{GGUF_NAMES[path]}.{kind}"
    parts = path.split(".")
    return f"blk.{parts[2]}.{GGUF_NAMES[parts[-1]]}.{kind}"


def interleaved(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to q and k of llama: row i of a head's halves become its rows 2i and 2i + 1."""
    out = np.empty_like(rows)
    head_dim = len(rows) // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = rows[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = rows[head * head_dim + head_dim // 2 + i]
    return out


def convert(directory: Path, kind: Kind | Callable[[str], Kind] = Kind.F32, **metadata: int) -> dict[str, Tensor]:
    """Puts model.gguf in the place of `directory`'s safetensors; returns these. Vectors stay float32."""
    weights = load_file(directory / "model.safetensors")
    config = read_config(directory)
    writer = gguf.GGUFWriter(directory / "model.gguf", config.model_type)
    counts = {"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads} | metadata
    for name, count in counts.items():
        writer.add_uint32(f"{config.model_type}.attention.{name}", count)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "déf"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    for name, tensor in weights.items():
        values = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and config.model_type == "llama":
            values = interleaved(values, heads)
        of_this = Kind.F32 if values.ndim == 1 else kind(name) if callable(kind) else kind
        writer.add_tensor(gguf_name(name), gguf.quantize(values, of_this), raw_dtype=of_this)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (directory / "model.safetensors").unlink()
    return weights


def streamed(directory: Path) -> dict[str, Tensor]:
    return dict(stream_gguf(directory / "model.gguf", lambda name: True))


@pytest.mark.parametrize("write", [write_llama, write_qwen3])
def test_names_and_values_are_those_of_the_checkpoint(tmp_path: Path, write: Callable[..., Path]) -> None:
    weights = convert(write(tmp_path, attention_bias=True))
    read = streamed(tmp_path)
    assert set(read) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize(("kind", "error"), [(Kind.F16, 2**-11), (Kind.BF16, 2**-8), (Kind.Q8_0, 1 / 254 + 2**-11)])
def test_quantised_tensors_come_as_near_as_their_type_allows(tmp_path: Path, kind: Kind, error: float) -> None:
    """Of its row's largest value: half a step; of Q8_0 a step is a float16 itself."""
    weights = convert(write_llama(tmp_path), kind)
    for name, tensor in streamed(tmp_path).items():
        expected = weights[name]
        assert tensor.dtype == torch.float32
        scale = expected.abs().amax(-1, keepdim=True)
        assert ((tensor - expected).abs() <= scale * error * 1.01).all(), name
        assert tensor.ndim == 1 or not torch.equal(tensor, expected), name  # it was quantised indeed


def test_other_dequantisations_are_the_packages(tmp_path: Path) -> None:
    """Rows of 64 in blocks of 32, four and five bits: shapes and bytes are handed over rightly."""
    convert(write_llama(tmp_path), lambda name: Kind.Q5_1 if "mlp" in name else Kind.Q4_1)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    file = GgufFile(tmp_path / "model.gguf")
    assert [tensor.name for tensor in file.tensors] == [tensor.name for tensor in reader.tensors]
    for ours, theirs in zip(file.tensors, reader.tensors, strict=True):
        assert ours.kind == theirs.tensor_type
        values = gguf.dequantize(theirs.data, theirs.tensor_type)
        assert np.array_equal(gguf.dequantize(ours.data, ours.kind), values), ours.name
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.attention.head_count"] == 4
    assert "tokenizer.ggml.tokens" not in file.metadata


def test_halves_of_heads_undo_the_order_of_llama_cpp() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    assert torch.equal(halves_of_heads(torch.from_numpy(interleaved(rows, 3)), 3), torch.from_numpy(rows))
    bias = np.arange(12, dtype=np.float32)
    assert halves_of_heads(torch.from_numpy(interleaved(bias, 2)), 2).tolist() == bias.tolist()
    assert interleaved(bias, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize("write", [write_llama, write_qwen3])
def test_a_directory_with_a_gguf_file_loads(tmp_path: Path, write: Callable[..., Path]) -> None:
    def load() -> dict[str, Tensor]:
        config = read_config(tmp_path)
        model = load_model(tmp_path, config, read_task(tmp_path, config), torch.device("cpu"), torch.float32)
        return dict(model.named_parameters(remove_duplicate=False))

    write(tmp_path)
    expected = load()
    convert(tmp_path)
    assert weight_files(tmp_path) == [tmp_path / "model.gguf"]
    got = load()
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_safetensors_go_before(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_tensors_of_other_models_keep_their_names() -> None:
    assert hugging_face_name("blk.3.ffn_gate_exps.weight") == "blk.3.ffn_gate_exps.weight"
    assert hugging_face_name("token_types.weight") == "token_types.weight"
    assert hugging_face_name("blk.11.attn_q.bias") == "model.layers.11.self_attn.q_proj.bias"


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        streamed(directory)
    assert str(directory / "model.gguf") in str(caught.value)
    return str(caught.value)


def test_what_is_no_whole_file_is_refused_at_every_length(tmp_path: Path) -> None:
    convert(write_llama(tmp_path), Kind.Q8_0)
    file = tmp_path / "model.gguf"
    whole = file.read_bytes()
    header = whole.index(b"rope_freqs") + 400
    for length in [*range(0, header, 7), len(whole) // 2, len(whole) - 64]:
        file.write_bytes(whole[:length])
        assert "is damaged or no GGUF file" in refusal(tmp_path)
    file.write_bytes(b"safe" + whole[4:])
    assert "begins with b'safe'" in refusal(tmp_path)
    file.write_bytes(whole[:4] + bytes([9]) + whole[5:])
    assert "version 9" in refusal(tmp_path)


def test_flipped_bytes_of_the_header_never_crash(tmp_path: Path) -> None:
    """A wrong header is refused, or leads to another set of tensors, which the loader then refuses by name."""
    convert(write_llama(tmp_path), Kind.F16)
    file = tmp_path / "model.gguf"
    whole = bytearray(file.read_bytes())
    random = np.random.default_rng(0)
    for at in random.integers(0, whole.index(b"blk.1") + 200, 300).tolist():
        changed = whole.copy()
        changed[at] ^= int(random.integers(1, 256))
        file.write_bytes(changed)
        try:
            assert isinstance(streamed(tmp_path), dict)
        except ModelError as error:
            assert str(file) in str(error)  # noqa: PT017 - either outcome is right


def test_unsupported_files_are_named(tmp_path: Path) -> None:
    convert(write_llama(tmp_path), head_count=0)
    assert "0 heads in attn_q" in refusal(tmp_path)
    convert(write_llama(tmp_path), head_count=3)
    assert "blk.0.attn_q.weight has 64 rows, which 3 heads cannot share" in refusal(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "architecture 'mamba' is not supported" in refusal(tmp_path)


def test_unsupported_types_and_tensors_are_named(tmp_path: Path) -> None:
    def write(name: str, values: NDArray[Any]) -> None:
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
        writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write("output.weight", np.ones((2, 4), np.int32))
    assert "output.weight has the type I32, which is not supported" in refusal(tmp_path)
    write_qwen3(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write("blk.0.ffn_gate_exps.weight", np.ones((2, 4), np.float32))
    config = read_config(tmp_path)
    with pytest.raises(ModelError, match=r"holds 'blk\.0\.ffn_gate_exps\.weight'"):
        load_model(tmp_path, config, read_task(tmp_path, config), torch.device("cpu"), torch.float32)
