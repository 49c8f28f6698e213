"""Of what types the values in a model directory's files must be, as far as they are read. Knows no file.

Keys that a file lacks have defaults here only so that they may be absent: what is meant then, readers say.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from ipc.types import Count

MAX_SIZE = 2**31 - 1  # what facts can carry, see ipc.types.Count


class Rope(Struct, kw_only=True):
    """rope_parameters or rope_scaling of a config.json, but for the numbers of one kind of scaling."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Meta(ge=0)] | None = None
    partial_rotary_factor: float | None = None


class ConfigFile(Struct, kw_only=True):
    """config.json, but for the sizes that every model has."""

    model_type: str | None = None
    architectures: list[str] | None = None
    hidden_act: str = ""
    layer_norm_eps: float = 0.0
    rms_norm_eps: float = 0.0
    type_vocab_size: Count = 0
    pad_token_id: int | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rope_theta: Annotated[float, Meta(ge=0)] | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    partial_rotary_factor: float | None = None
    is_causal: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    num_labels: Count | None = None
    id2label: dict[str, Any] | None = None


class Module(Struct):
    """A line of modules.json."""

    type: str
    path: str


class Dense(Struct):
    """config.json in the folder of a Dense module."""

    in_features: Annotated[int, Meta(ge=1, le=MAX_SIZE)]
    out_features: Annotated[int, Meta(ge=1, le=MAX_SIZE)]
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    use_residual: bool | None = False
    module_input_name: str = "sentence_embedding"


class LogitScore(Struct):
    """config.json in the folder of a LogitScore module."""

    true_token_id: Count
    false_token_id: Count | None = None


class Activation(Struct):
    """config_sentence_transformers.json, or what config.json has of it."""

    activation_fn: str | None = None


class Activations(Struct):
    """config.json of a model that scores."""

    sentence_transformers: Activation | None = None
    sbert_ce_default_activation_function: str | None = None


class Limits(Struct):
    """tokenizer_config.json, sentence_bert_config.json."""

    max_seq_length: float | None = None
    model_max_length: float | None = None


class TokenizerModel(Struct):
    vocab: dict[str, Count] | list[Any]  # Unigram has pieces and their scores


class TokenizerFile(Struct):
    """tokenizer.json."""

    model: TokenizerModel


class WeightIndex(Struct):
    """model.safetensors.index.json."""

    weight_map: dict[str, str]  # files by tensors
