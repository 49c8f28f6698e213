"""What is read out of a GGUF file: the right sizes and a tokenizer that agrees with others' on every text."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gateway.models import load_model
from rose.models.config import read_config
from rose.models.task import GenerateTask, read_task
from services import gguf_files
from services.gguf_files import MODEL_FILE, is_prepared, llama3_factors, prepare
from services.source_names import SourceError
from tests.services.gguf_writing import HIDDEN, SPECIAL, train_bpe, write_gguf

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TEXTS = [
    "12345 roses, 2024 tulips; it's a rose isn't it? WE'LL SEE",
    "  leading, trailing  \n\n\ttabs\r\nand\u00a0more ",
    "naïve Ångström e\u0301 ﬁ ² ١٢٣ 日本語 🌹",
    "def f(x):\n    return x**2 # <tag>",
]


def prepared(tmp_path: Path, **changes: Any) -> Path:
    write_gguf(tmp_path / MODEL_FILE, **changes)
    prepare(tmp_path)
    return tmp_path


def read(directory: Path, name: str) -> Any:
    return json.loads((directory / name).read_text())


def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_the_config_has_hugging_face_keys(tmp_path: Path) -> None:
    config = read(prepared(tmp_path), "config.json")
    assert config.pop(gguf_files.VERSION_KEY) == gguf_files.VERSION
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(train_bpe()[0]),
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_qwen3_untied_with_heads_of_their_own_size(tmp_path: Path) -> None:
    size = {"qwen3__attention__key_length": 8, "qwen3__attention__value_length": 8}
    head = {"output.weight": np.zeros((300, HIDDEN), np.float32), "blk.0.attn_q.bias": np.zeros(32, np.float32)}
    config = read(prepared(tmp_path, arch="qwen3", pre="qwen2", tensors=head, **size), "config.json")
    expected = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "attention_bias": True}
    assert expected.items() <= config.items()
    assert config["tie_word_embeddings"] is False


def test_linear_scaling(tmp_path: Path) -> None:
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.5}
    assert read(prepared(tmp_path, **scaling), "config.json")["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}


def llama3_config() -> transformers.LlamaConfig:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    return transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131_072, rope_parameters=scaling
    )


def test_llama3_scaling_is_found_again_in_its_factors(tmp_path: Path) -> None:
    """transformers' frequencies, divided as a converter divides them."""
    config = llama3_config()
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** (-np.arange(0, 64, 2) / 64)
    factors = (plain / scaled.numpy()).astype(np.float32)
    values = {"llama__embedding_length": 256, "llama__rope__freq_base": 500_000.0}
    found = read(prepared(tmp_path, tensors={"rope_freqs.weight": factors}, **values), "config.json")["rope_scaling"]
    assert found == {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}
    assert llama3_factors(64, 500_000.0, found) == pytest.approx(factors, rel=1e-5)


def test_the_rank_and_the_gateway_read_what_was_written(tmp_path: Path) -> None:
    factors = np.array(llama3_factors(4, 1e7, LLAMA3), np.float32)
    llama, qwen3 = tmp_path / "llama", tmp_path / "qwen3"
    for directory in (llama, qwen3):
        directory.mkdir()
    prepared(llama, tensors={"rope_freqs.weight": factors}, llama__rope__freq_base=1e7)
    prepared(qwen3, arch="qwen3", pre="qwen2", tensors={"output.weight": np.zeros((300, HIDDEN), np.float32)})
    for directory, tied in ((llama, True), (qwen3, False)):
        config = read_config(directory)
        assert (config.tie_word_embeddings, config.head_dim, config.max_model_len) == (tied, 4, 128)
        task = read_task(directory, config, "auto")
        assert isinstance(task, GenerateTask)
        assert set(task.eos_token_ids) == {0, 2}
        assert load_model("m", directory).tokenizer.special_ids("<|im_end|>a")[0] == 2
    scaling = read_config(llama).rope_scaling
    assert scaling is not None
    assert scaling.factor == LLAMA3["factor"]


def test_factors_of_another_scaling_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"rope_freqs\.weight are not those of Llama 3"):
        prepared(tmp_path, tensors={"rope_freqs.weight": np.array([1.0, 3.0], np.float32)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma"}, "its architecture is 'gemma'"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__attention__sliding_window": 64}, "sliding window"),
        ({"llama__pooling_type": 3}, "embedding or reranking model"),
        ({"llama__rope__dimension_count": 2}, "heads of 4 of which 2 are rotated"),
        ({"llama__rope__scaling__type": "yarn"}, "is 'yarn'"),
        ({"llama__block_count": None}, r"has no llama\.block_count"),
        ({"llama__block_count": 0}, r"block_count is 0"),
        ({"llama__attention__head_count": "four"}, r"head_count is 'four' where a int belongs"),
        ({"split__count": 3}, "one part of several"),
        ({"tokenizer__ggml__model": "llama"}, "SentencePiece"),
        ({"tokenizer__ggml__model": "bert"}, "the tokenizer 'bert'"),
        ({"pre": "tekken"}, "its pre-tokenizer is 'tekken'; known are gpt-2, smollm"),
        ({"tokenizer__ggml__pre": None}, r"has no tokenizer\.ggml\.pre"),
        ({"kinds": [1]}, "tokens and 1 kinds"),
        ({"tokens": ["a", "b"]}, "its tokenizer is inconsistent"),
        ({"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 99_999}, "bos_token_id is 99999"),
        ({"tensors": {"token_embd.weight": None}}, r"no token_embd\.weight"),
        ({"tensors": {"token_embd.weight": np.zeros((8, HIDDEN), np.float32)}}, "but embeddings of 8"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"{re.escape(str(tmp_path / MODEL_FILE))}: .*{message}"):
        prepared(tmp_path, **changes)
    assert not is_prepared(tmp_path)


@pytest.mark.parametrize("length", [0, 3, 40, 5000])
def test_a_damaged_file(length: int, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / MODEL_FILE).write_bytes(whole[:length])
    with pytest.raises(SourceError, match="cannot be read as a GGUF file"):
        prepare(tmp_path)


def test_what_another_version_wrote_counts_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = prepared(tmp_path)
    assert is_prepared(directory)
    monkeypatch.setattr(gguf_files, "VERSION", gguf_files.VERSION + 1)
    assert not is_prepared(directory)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_text_comes_back_whole(pre: str, text: str, tmp_path: Path) -> None:
    found = tokenizer(prepared(tmp_path, pre=pre))
    expected = text.replace("e\u0301", "é") if pre == "qwen2" else text  # NFC
    assert found.decode(found.encode(text).ids) == expected


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "ĠROSES", "'", "LL"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠROSES", "'", "LL"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "ĠROSES", "'LL"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠROSES", "'LL"]),
    ],
)
def test_how_text_is_divided_into_words(pre: str, words: list[str], tmp_path: Path) -> None:
    found = tokenizer(prepared(tmp_path, pre=pre)).pre_tokenizer
    assert found is not None
    assert [word for word, _ in found.pre_tokenize_str("It's 12345 ROSES'LL")] == words


def test_qwen2_is_as_transformers_has_it(tmp_path: Path) -> None:
    tokens, merges = train_bpe()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = transformers.Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    ours = tokenizer(prepared(tmp_path, arch="qwen3", pre="qwen2"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text), text


def test_kinds_of_tokens(tmp_path: Path) -> None:
    """Control tokens are special, a user's are not, and what only fills up is no token at all."""
    tokens = [*train_bpe()[0], "<think>", "[PAD1]"]
    kinds = [3 if token in SPECIAL else 1 for token in tokens[:-2]] + [4, 5]
    directory = prepared(tmp_path, tokens=tokens, kinds=kinds)
    found = tokenizer(directory)
    assert found.encode("<|im_start|>a<think>").ids == [1, found.token_to_id("a"), len(tokens) - 2]
    assert found.decode([1, len(tokens) - 2]) == "<think>"
    assert found.token_to_id("[PAD1]") is None
    assert read(directory, "config.json")["vocab_size"] == len(tokens)
    assert read(directory, "generation_config.json") == {"bos_token_id": 1, "eos_token_id": [2, 0]}


def test_the_first_token_is_added_where_the_file_says(tmp_path: Path) -> None:
    for pre, says, added in (("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True)):
        directory = tmp_path / f"{pre}-{says}"
        directory.mkdir()
        prepared(directory, pre=pre, tokenizer__ggml__add_bos_token=says)
        assert (tokenizer(directory).encode("a").ids[0] == 1) is added
        assert read(directory, "tokenizer_config.json")["add_bos_token"] is added


def test_templates(tmp_path: Path) -> None:
    config = read(prepared(tmp_path), "tokenizer_config.json")
    expected = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    assert expected.items() <= config.items()
    more = {"tokenizer__chat_templates": ["tool_use"], "tokenizer__chat_template__tool_use": "{{ tools }}"}
    assert read(prepared(tmp_path, **more), "tokenizer_config.json")["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


def test_smollm2(smollm2_dir: Path) -> None:
    """The default chat model: ids as its own tokenizer gives them."""
    found = tokenizer(smollm2_dir)
    assert found.encode("Hello, world!").ids == [19556, 28, 905, 17]
    assert found.encode("12345").ids == [33, 34, 35, 36, 37]
    assert found.encode("<|im_start|>user\nhi<|im_end|>\n").ids == [1, 4093, 198, 6004, 2, 198]
    for text in TEXTS:
        assert found.decode(found.encode(text).ids) == text
    config = read(smollm2_dir, "config.json")
    shape = {"num_hidden_layers": 30, "hidden_size": 576, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152}
    assert shape.items() <= config.items()
    assert (config["rope_theta"], config["tie_word_embeddings"]) == (100_000.0, True)
    assert read(smollm2_dir, "generation_config.json")["eos_token_id"] == [2, 0]
    assert "<|im_start|>" in read(smollm2_dir, "tokenizer_config.json")["chat_template"]
