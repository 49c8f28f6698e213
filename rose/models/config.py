"""A model's shape, read from its Hugging Face config.json. Knows files, no tensors."""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from rose.layers.activation import ACTIVATIONS
from rose.layers.rotary import RopeScaling
from rose.models.files import MAX_SIZE, ConfigFile

T = TypeVar("T")

MAX_POSITIONS = 1 << 20  # more than any model here was trained for; a step's arrays are sized by it
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
POSITION_RESERVE = {"xlm-roberta": 1, "roberta": 1}  # position embeddings start at pad_token_id + 1


class ModelError(ValueError):
    """A model directory that cannot be served; the text says which file or key, why, and what to do."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Sizes and switches of one transformer. Field names are Hugging Face's where they have one."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    norm_eps: float
    max_position_embeddings: int
    type_vocab_size: int = 0
    position_offset: int = 0  # index of the first position's embedding
    causal: bool = False
    gated: bool = False  # the feed-forward half has a gate
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = True
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    num_labels: int = 1

    @property
    def max_model_len(self) -> int:
        """The longest sequence that has a position for every token."""
        return self.max_position_embeddings - self.position_offset


def read_as(path: Path, kind: type[T]) -> T:
    """The parsed file, as a type that msgspec knows. Raises ModelError, naming it, as read_json, and if it is none."""
    return _as(kind, read_json(path), path)


def _as(kind: type[T], value: Any, path: Path) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path} is damaged ({error}): fetch the model again") from None


def read_json(path: Path) -> Any:
    """The parsed file. Raises ModelError, naming it, if it is missing, unreadable or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model directory in Hugging Face layout has it") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}): fetch the model again") from None


def read_config(directory: Path) -> ModelConfig:
    """The shape of the model in `directory`. Raises ModelError for what is missing or not supported."""
    path = directory / "config.json"
    raw = read_as(path, dict[str, Any])
    file = _as(ConfigFile, raw, path)
    readers = {"bert": _bert, "roberta": _bert, "xlm-roberta": _bert, "qwen3": _qwen3}
    readers |= {"bidirectional_pplx_qwen3": _qwen3, "llama": _llama}
    reader = readers.get(file.model_type or "")
    if reader is None:
        known = ", ".join(sorted(readers))
        raise ModelError(f"{path}: model_type {raw.get('model_type')!r} is not supported (supported: {known})")
    try:
        _check_sizes(raw)
        return reader(raw)
    except KeyError as error:
        raise ModelError(f"{path} has no {error.args[0]!r}: fetch the model again") from None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _check_sizes(raw: dict[str, Any]) -> None:
    """Raises ModelError for sizes that no model can have, KeyError for one that is missing."""
    for name in (*SIZES, "max_position_embeddings"):
        if type(raw[name]) is not int or raw[name] < 1:
            raise ModelError(f"{name} is {raw[name]!r}: it must be a whole number from 1 on")
        if raw[name] > MAX_SIZE:
            raise ModelError(f"{name} is {raw[name]}: at most {MAX_SIZE} are served")
    if raw["max_position_embeddings"] > MAX_POSITIONS:
        raise ModelError(
            f"max_position_embeddings is {raw['max_position_embeddings']}: at most {MAX_POSITIONS} are served"
        )
    if not raw.get("head_dim") and raw["hidden_size"] % raw["num_attention_heads"]:
        raise ModelError(
            f"hidden_size {raw['hidden_size']} is no multiple of num_attention_heads {raw['num_attention_heads']}: "
            "fetch the model again"
        )


def _bert(raw: dict[str, Any]) -> ModelConfig:
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError("position_embedding_type must be 'absolute'")
    num_heads = raw["num_attention_heads"]
    reserve = POSITION_RESERVE.get(raw["model_type"])
    offset = 0
    if reserve is not None:
        pad, num_positions = raw["pad_token_id"], raw["max_position_embeddings"]
        if pad is None or not 0 <= pad < num_positions - reserve:
            raise ModelError(f"pad_token_id is {pad}: positions begin behind it, and there are {num_positions}")
        offset = pad + reserve
    return ModelConfig(
        **_common(raw),
        num_key_value_heads=num_heads,
        head_dim=raw["hidden_size"] // num_heads,
        norm_eps=raw["layer_norm_eps"],
        type_vocab_size=raw["type_vocab_size"],
        position_offset=offset,
    )


def _qwen3(raw: dict[str, Any]) -> ModelConfig:
    if raw.get("use_sliding_window"):
        raise ModelError("use_sliding_window is not supported: use a model with full attention")
    bidirectional = raw["model_type"].startswith("bidirectional") or raw.get("use_bidirectional_attention")
    return ModelConfig(**_gated(raw), causal=not bidirectional and raw.get("is_causal", True))


def _llama(raw: dict[str, Any]) -> ModelConfig:
    if raw.get("sliding_window"):
        raise ModelError("sliding_window is not supported: use a model with full attention")
    if raw.get("pretraining_tp", 1) != 1:
        raise ModelError(f"pretraining_tp {raw['pretraining_tp']} is not supported, only 1 is")
    return ModelConfig(**_gated(raw), causal=True, mlp_bias=raw.get("mlp_bias", False))


def _gated(raw: dict[str, Any]) -> dict[str, Any]:
    """What Llama and its kin have in common: rotary positions, grouped heads, a gated feed-forward half."""
    if raw["hidden_act"] != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu' is")
    if raw.get("quantization_config"):
        raise ModelError("quantization_config: weights quantised by other tools are not supported, use plain ones")
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd: rotary positions turn pairs")
    return _common(raw) | {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": raw["rms_norm_eps"],
        "gated": True,
        "attention_bias": raw.get("attention_bias", False),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        **_rope(raw),
    }


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from the keys of transformers 5 (rope_parameters) or of earlier ones."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"rope scaling {rope} is not supported (supported: default, linear, llama3)")
    if raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1)) != 1:
        raise ModelError("partial_rotary_factor is not supported: whole heads are turned")
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    names = RopeScaling.__struct_fields__[1:] if kind == "llama3" else ("factor",)
    for name in names:
        if not isinstance(rope[name], int | float) or rope[name] <= 0:
            raise ModelError(f"rope scaling's {name} is {rope[name]!r}: it must be a number above 0")
    scaling = RopeScaling(rope_type=kind, **{name: rope[name] for name in names})
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError(f"rope scaling {rope}: high_freq_factor must be above low_freq_factor")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _common(raw: dict[str, Any]) -> dict[str, Any]:
    if raw["hidden_act"] not in ACTIVATIONS:
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported (supported: {', '.join(ACTIVATIONS)})")
    return {name: raw[name] for name in (*SIZES, "max_position_embeddings", "hidden_act", "model_type")} | {
        "architecture": (raw.get("architectures") or [""])[0],
        "num_labels": raw.get("num_labels") or len(raw.get("id2label") or (0, 1)),  # two is transformers' default,
    }
