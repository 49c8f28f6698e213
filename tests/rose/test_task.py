"""What a model directory's files say, and what is refused with which words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

from rose.config import RankConfig
from rose.encoder_loader import EncoderLoader
from rose.layers.rotary import RopeScaling
from rose.models.config import ModelError, read_config
from rose.models.task import EmbedTask, GenerateTask, ScoreTask, Task, read_task, trained_max_len
from tests.rose.driving import Driver
from tests.rose.tiny_models import add_modules, bert_config, llama_config, qwen3_config, save

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def config_only(directory: Path, config: Any, architecture: str) -> Path:
    """A directory with config.json and no weights: facts and task need none."""
    write(directory / "config.json", config.to_dict() | {"architectures": [architecture]})
    return directory


def task_of(directory: Path, override: Any = "auto") -> Task:
    return read_task(directory, read_config(directory), override)


def test_plain_transformer_is_mean_pooled_and_not_normalised(tmp_path: Path) -> None:
    task = task_of(config_only(tmp_path, bert_config(), "BertModel"))
    assert isinstance(task, EmbedTask)
    assert (task.pooling, task.normalize, task.dense, task.dimension) == ("mean", False, (), 48)


@pytest.mark.parametrize(
    ("raw", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last_token"),
        ({"pooling_mode": "lasttoken"}, "last_token"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({"word_embedding_dimension": 48}, "mean"),
    ],
)
def test_pooling_files_old_and_new(tmp_path: Path, raw: dict[str, Any], pooling: str) -> None:
    config_only(tmp_path, bert_config(), "BertModel")
    add_modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling=raw)
    task = task_of(tmp_path)
    assert isinstance(task, EmbedTask)
    assert (task.pooling, task.normalize) == (pooling, True)


def test_dense_layers_equal_sentence_transformers(tmp_path: Path) -> None:
    save(hf.BertModel, bert_config(), tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    hf.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    add_modules(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize", pooling={"pooling_mode": "cls"})
    torch.manual_seed(1)
    for folder, (rows, columns, act) in {"2_Dense": (32, 48, "Tanh"), "3_Dense": (20, 32, "Identity")}.items():
        module = "linear" if act == "Identity" else "activation"
        raw = {"in_features": columns, "out_features": rows, "bias": act == "Tanh"}
        write(tmp_path / folder / "config.json", raw | {"activation_function": f"torch.nn.modules.{module}.{act}"})
        weights = {"linear.weight": torch.randn(rows, columns)}
        if act == "Tanh":
            weights["linear.bias"] = torch.randn(rows)
        save_file(weights, tmp_path / folder / "model.safetensors")
    driver = Driver(tmp_path)
    assert driver.facts.dimension == 20
    reference = SentenceTransformer(str(tmp_path), device="cpu")
    texts = ["a b c", "h", "g f e d c b a"]
    ids = [reference.tokenizer(text)["input_ids"] for text in texts]
    np.testing.assert_allclose(driver.vectors(ids), reference.encode(texts), atol=1e-5)
    driver.close()


@pytest.mark.parametrize(
    ("extra", "act"),
    [
        ({}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"id2label": {"0": "no", "1": "yes"}}, "identity"),
    ],
)
def test_score_activation_is_sentence_transformers_rule(tmp_path: Path, extra: dict[str, Any], act: str) -> None:
    raw = bert_config(num_labels=1).to_dict() | {"architectures": ["BertForSequenceClassification"]} | extra
    write(tmp_path / "config.json", raw)
    task = task_of(tmp_path)
    assert isinstance(task, ScoreTask)
    assert (task.kind, task.act) == ("classify", act)


def test_two_labels_when_the_file_does_not_say(tmp_path: Path) -> None:
    raw = bert_config().to_dict() | {"architectures": ["BertForSequenceClassification"]}
    raw.pop("id2label", None)
    write(tmp_path / "config.json", raw)
    task = task_of(tmp_path)
    assert isinstance(task, ScoreTask)
    assert task.num_labels == 2


def test_logit_score_module_names_the_answers(tmp_path: Path) -> None:
    config_only(tmp_path, qwen3_config(), "Qwen3ForCausalLM")
    add_modules(tmp_path, "Transformer", "LogitScore")
    write(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": 9, "false_token_id": 4})
    assert task_of(tmp_path) == ScoreTask("yes_no", "sigmoid", 1, 9, 4)


def test_causal_model_without_a_marker_generates(tmp_path: Path) -> None:
    config_only(tmp_path, qwen3_config(), "Qwen3ForCausalLM")
    assert isinstance(task_of(tmp_path), GenerateTask)
    with pytest.raises(ModelError, match='task = "embed"'):
        EncoderLoader("tiny", tmp_path, RankConfig(device="cpu"))
    assert isinstance(task_of(tmp_path, "embed"), EmbedTask)
    write(tmp_path / "tokenizer.json", {"model": {"vocab": {"yes": 3}}})
    with pytest.raises(ModelError, match='lacks "yes" or "no"'):
        task_of(tmp_path, "score")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be"),
        ({"hidden_size": 383}, "no multiple of num_attention_heads"),
        ({"max_position_embeddings": 10**9}, "at most 1048576"),
        ({"vocab_size": 0}, "whole number from 1 on"),
        ({"vocab_size": 1 << 31}, "vocab_size is 2147483648: at most 2147483647"),
        ({"num_hidden_layers": "two"}, "whole number from 1 on"),
        ({"hidden_act": "squareplus"}, "hidden_act 'squareplus' is not supported"),
    ],
)
def test_unsupported_models_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write(tmp_path / "config.json", bert_config().to_dict() | {"architectures": ["BertModel"]} | change)
    with pytest.raises(ModelError, match=words):
        task_of(tmp_path)


def test_two_sided_model_does_not_generate(tmp_path: Path) -> None:
    config_only(tmp_path, qwen3_config(is_causal=False), "Qwen3ForCausalLM")
    for override in ("auto", "generate"):
        with pytest.raises(ModelError, match='cannot generate: set task = "embed"'):
            task_of(tmp_path, override)


def test_marked_causal_models_generate_only_when_told(tmp_path: Path) -> None:
    config_only(tmp_path, qwen3_config(), "Qwen3ForCausalLM")
    add_modules(tmp_path, "Transformer", "Pooling")
    assert isinstance(task_of(tmp_path), EmbedTask)
    assert isinstance(task_of(tmp_path, "generate"), GenerateTask)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 7, 9]}, (9, 7)),
        ({"eos_token_id": [3, 4]}, {"temperature": 0.6}, (3, 4)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_ends_of_a_text(tmp_path: Path, config: Any, generation: Any, ends: tuple[int, ...]) -> None:
    write(tmp_path / "config.json", qwen3_config().to_dict() | {"architectures": ["Qwen3ForCausalLM"]} | config)
    if generation is not None:
        write(tmp_path / "generation_config.json", generation)
    assert task_of(tmp_path) == GenerateTask(ends)


@pytest.mark.parametrize("token_id", [128, -1, "</s>", True])
def test_ends_outside_the_vocabulary_are_refused(tmp_path: Path, token_id: Any) -> None:
    config_only(tmp_path, qwen3_config(), "Qwen3ForCausalLM")
    write(tmp_path / "generation_config.json", {"eos_token_id": token_id})
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id .* is outside the vocabulary of 128"):
        task_of(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 4096}, "sliding_window is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp 2 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling .* is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0: it must be a number above 0"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "has no 'low_freq_factor'"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor must be above"),
    ],
)
def test_unsupported_llamas_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write(tmp_path / "config.json", llama_config().to_dict() | {"architectures": ["LlamaForCausalLM"]} | change)
    with pytest.raises(ModelError, match=words):
        task_of(tmp_path)


def test_llama_config_of_old_files(tmp_path: Path) -> None:
    raw = llama_config().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    for name in ("rope_parameters", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"):
        del raw[name]
    write(tmp_path / "config.json", raw | {"rope_scaling": {"type": "linear", "factor": 2}, "sliding_window": None})
    config = read_config(tmp_path)
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=2)
    assert (config.rope_theta, config.num_key_value_heads, config.head_dim) == (10000.0, 4, 12)
    assert (config.causal, config.attention_bias, config.mlp_bias) == (True, False, False)


def test_rope_scaling_and_max_pooling_are_refused(tmp_path: Path) -> None:
    raw = qwen3_config().to_dict() | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    write(tmp_path / "config.json", raw)
    with pytest.raises(ModelError, match="rope scaling"):
        task_of(tmp_path)
    config_only(tmp_path, bert_config(), "BertModel")
    add_modules(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode_max_tokens": True})
    with pytest.raises(ModelError, match="pooling 'max' is not supported"):
        task_of(tmp_path)


DAMAGED = [
    ("config.json", [], r"Expected `object`, got `array`"),
    ("config.json", 5, r"Expected `object`, got `int`"),
    ("config.json", {"model_type": ["llama"]}, r"model_type"),
    ("config.json", {"architectures": 5}, r"architectures"),
    ("config.json", {"architectures": [None]}, r"architectures"),
    ("config.json", {"rope_parameters": "linear"}, r"rope_parameters"),
    ("config.json", {"rope_scaling": [1]}, r"rope_scaling"),
    ("config.json", {"rope_theta": "many"}, r"rope_theta"),
    ("config.json", {"rms_norm_eps": None}, r"rms_norm_eps"),
    ("config.json", {"num_key_value_heads": -2}, r"num_key_value_heads"),
    ("config.json", {"head_dim": "x"}, r"head_dim"),
    ("config.json", {"id2label": 3}, r"id2label"),
    ("config.json", {"eos_token_id": [[1]]}, r"eos_token_id \[1\] is outside"),
    ("generation_config.json", [1], r"Expected `object`"),
    ("generation_config.json", {"eos_token_id": {"a": 1}}, r"eos_token_id \{'a': 1\} is outside"),
    ("modules.json", 5, r"Expected `array`"),
    ("modules.json", ["Transformer"], r"Expected `object`, got `str`"),
    ("modules.json", [{"type": "a.Transformer"}], r"missing required field `path`"),
    ("1_Pooling/config.json", [], r"Expected `object`"),
    ("1_Pooling/config.json", {"pooling_mode": [{}, 1]}, r"pooling '\{\}\+1' is not supported"),
    ("1_Pooling/config.json", {"pooling_mode": {"a": 1}}, r"pooling \{'a': 1\} is not supported"),
    ("2_Dense/config.json", None, r"Expected `object`"),
    ("2_Dense/config.json", {"in_features": 48}, r"missing required field `out_features`"),
    ("2_Dense/config.json", {"in_features": 48, "out_features": 8, "activation_function": 1}, r"activation_function"),
    ("1_LogitScore/config.json", {}, r"missing required field `true_token_id`"),
    ("tokenizer_config.json", [], r"Expected `object`"),
    ("tokenizer_config.json", {"model_max_length": "512"}, r"model_max_length"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: Any, words: str) -> None:
    """JSON, but not as it should be."""
    raw = llama_config().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    write(tmp_path / "config.json", raw)
    if "_" in name and "/" in name:
        kind = name.partition("/")[0].partition("_")[2]
        add_modules(tmp_path, "Transformer", *(["Pooling"] if kind == "Dense" else []))
        listed = json.loads((tmp_path / "modules.json").read_text())
        write(tmp_path / "modules.json", [*listed, {"type": f"a.{kind}", "path": name.partition("/")[0]}])
    write(tmp_path / name, raw | content if name == "config.json" and isinstance(content, dict) else content)
    look = trained_max_len if name == "tokenizer_config.json" else task_of
    with pytest.raises(ModelError, match=rf"{name}.*{words}"):
        look(tmp_path)


@pytest.mark.parametrize(
    "content", [{}, [], {"model": None}, {"model": {"vocab": None}}, {"model": {"vocab": {"a": "b"}}}]
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: Any) -> None:
    config_only(tmp_path, qwen3_config(), "Qwen3ForCausalLM")
    write(tmp_path / "tokenizer.json", content)
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged \(.*\): fetch the model again"):
        task_of(tmp_path, "score")


@pytest.mark.parametrize("config", [{"sentence_transformers": "x"}, {"sbert_ce_default_activation_function": [1]}])
def test_a_damaged_activation_is_named(tmp_path: Path, config: Any) -> None:
    raw = bert_config().to_dict() | {"architectures": ["BertForSequenceClassification"]}
    write(tmp_path / "config.json", raw | config)
    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        task_of(tmp_path)


@pytest.mark.parametrize("pad", [None, -2, 10**6])
def test_positions_that_begin_nowhere(tmp_path: Path, pad: int | None) -> None:
    raw = bert_config().to_dict() | {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}
    write(tmp_path / "config.json", raw | {"pad_token_id": pad})
    with pytest.raises(ModelError, match=f"config.json: pad_token_id is {pad}"):
        task_of(tmp_path)


def test_limits_come_from_the_authors_and_the_settings(tmp_path: Path) -> None:
    config_only(tmp_path, bert_config(), "BertModel")

    def max_model_len(**settings: int) -> int:
        return EncoderLoader("tiny", tmp_path, RankConfig(device="cpu", **settings)).facts.max_model_len

    assert max_model_len() == 64
    write(tmp_path / "tokenizer_config.json", {"model_max_length": 1e30})
    assert max_model_len() == 64
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 40})
    assert max_model_len() == 40
    assert max_model_len(max_model_len=50) == 50  # the positions allow it
    with pytest.raises(ModelError, match="max_model_len 65 is over the 64 positions"):
        max_model_len(max_model_len=65)
    with pytest.raises(ModelError, match="max_num_batched_tokens 30 is below max_model_len 40"):
        max_model_len(max_num_batched_tokens=30)
