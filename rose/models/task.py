"""What a model directory is for, and what comes after its transformer, by the directory's own files.

Embedding: sentence-transformers' modules.json lists Transformer, Pooling, Dense, Normalize with a folder each. Without
it: mean pooling, nothing else, as sentence-transformers does. Scoring: a `…ForSequenceClassification`, or a causal
model judged by the logits of "yes" and "no". Generation: a `…ForCausalLM` whose files name no other use. Knows files,
no tensors.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from msgspec import Struct

from ipc.types import Pooling
from rose.models.config import ModelConfig, ModelError, read_as
from rose.models.files import Activation, Activations, Dense, Limits, LogitScore, Module, TokenizerFile

T = TypeVar("T")

_POOLING = {"cls": "cls", "mean": "mean", "lasttoken": "last_token"}
_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_NO_LIMIT = 1 << 24  # tokenizer files say 1e30 for "no limit"


class DenseSpec(Struct, frozen=True):
    """One projection of the pooled vector; its weights are in `directory`."""

    directory: Path
    in_features: int
    out_features: int
    bias: bool
    act: str


class EmbedTask(Struct, frozen=True):
    """Pool, project, normalise. `int8`: how a row becomes bytes (see rose.pooling)."""

    kind: ClassVar[str] = "embed"
    pooling: Pooling
    dense: tuple[DenseSpec, ...]
    normalize: bool
    int8: Literal["tanh", "scaled"]
    dimension: int


class ScoreTask(Struct, frozen=True):
    """`num_labels` scores a sequence: a classification head's, or yes against no at the last token."""

    kind: Literal["classify", "yes_no"]
    act: str
    num_labels: int = 1
    yes_token_id: int = -1
    no_token_id: int = -1  # negative: the score is the logit of "yes" alone


class GenerateTask(Struct, frozen=True):
    """Continue a text, token by token, until one of `eos_token_ids` (there may be none)."""

    kind: ClassVar[str] = "generate"
    eos_token_ids: tuple[int, ...]


Task = EmbedTask | ScoreTask | GenerateTask


def read_task(
    directory: Path, config: ModelConfig, override: Literal["auto", "embed", "score", "generate"] = "auto"
) -> Task:
    """The task of the model in `directory`. Raises ModelError if its files do not say or say something unsupported."""
    modules = _modules(directory)
    kinds = [kind for kind, _ in modules]
    classifies = config.architecture.endswith("ForSequenceClassification")
    speaks = config.architecture.endswith("ForCausalLM") and not modules
    if override == "generate" or (override == "auto" and speaks):
        return _generate_task(directory, config)
    if override == "embed" or (override == "auto" and not classifies and "LogitScore" not in kinds):
        return _embed_task(directory, config, modules)
    if classifies:
        return ScoreTask("classify", _score_activation(directory, config.num_labels), config.num_labels)
    return _yes_no_task(directory, modules)


def trained_max_len(directory: Path) -> int | None:
    """The length limit that the model's authors set (tokens, special ones included); None if they set none."""
    limits = []
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        value = getattr(_optional(directory / name, Limits) or Limits(), key)
        if value is not None and 1 <= value < _NO_LIMIT:
            limits.append(int(value))
    return min(limits, default=None)


def _modules(directory: Path) -> list[tuple[str, Path]]:
    """(class name, folder) of each line of modules.json, in order; empty without that file."""
    listed = _optional(directory / "modules.json", list[Module]) or []
    return [(entry.type.rpartition(".")[2], directory / entry.path) for entry in listed]


def _embed_task(directory: Path, config: ModelConfig, modules: list[tuple[str, Path]]) -> EmbedTask:
    pooling: Pooling = "mean"
    dense: list[DenseSpec] = []
    normalize = False
    for kind, folder in modules:
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _pooling(folder / "config.json")
            case "Dense":
                dense.append(_dense(folder))
            case "Normalize":
                normalize = True
            case _ if kind.endswith("Quantizer"):
                pass  # the row's own dtype says what becomes of it
            case _:
                raise ModelError(f"{directory / 'modules.json'}: module {kind!r} is not supported")
    width = config.hidden_size
    for layer in dense:
        if layer.in_features != width:
            raise ModelError(f"{layer.directory}: in_features {layer.in_features}, but {width} values arrive")
        width = layer.out_features
    trained_for_int8 = config.model_type.startswith("bidirectional_pplx")
    return EmbedTask(pooling, tuple(dense), normalize, "tanh" if trained_for_int8 else "scaled", width)


def _pooling(path: Path) -> Pooling:
    raw = read_as(path, dict[str, Any])
    if not raw.get("include_prompt", True):
        raise ModelError(f"{path}: pooling without the prompt (include_prompt) is not supported")
    mode = raw.get("pooling_mode") or [name for key, name in _LEGACY_POOLING.items() if raw.get(key)] or "mean"
    if isinstance(mode, list):
        mode = mode[0] if len(mode) == 1 else "+".join(map(str, mode))
    if not isinstance(mode, str) or mode not in _POOLING:
        raise ModelError(f"{path}: pooling {mode!r} is not supported (supported: {', '.join(_POOLING)})")
    return _POOLING[mode]  # type: ignore[return-value]


def _dense(folder: Path) -> DenseSpec:
    path = folder / "config.json"
    raw = read_as(path, Dense)
    if raw.use_residual or raw.module_input_name != "sentence_embedding":
        raise ModelError(f"{path}: only a plain projection of the pooled vector is supported")
    act = _torch_activation(raw.activation_function, path)
    return DenseSpec(folder, raw.in_features, raw.out_features, raw.bias, act)


def _score_activation(directory: Path, num_labels: int) -> str:
    """sentence-transformers' rule: what the files name, else a sigmoid for one label and nothing for several."""
    config_path = directory / "config.json"
    config = read_as(config_path, Activations)
    nested = config.sentence_transformers or Activation()
    own = _optional(directory / "config_sentence_transformers.json", Activation) or Activation()
    named = nested.activation_fn or config.sbert_ce_default_activation_function or own.activation_fn
    if named is None:
        return "sigmoid" if num_labels == 1 else "identity"
    return _torch_activation(named, config_path)


def _torch_activation(dotted: str, path: Path) -> str:
    """The lower-case name of a torch.nn class given as a dotted path; nothing is imported."""
    name = dotted.rpartition(".")[2].lower()
    if not dotted.startswith("torch.") or name not in ("identity", "sigmoid", "tanh", "relu", "gelu", "silu"):
        raise ModelError(f"{path}: activation {dotted!r} is not supported: use one of torch.nn's")
    return name


def _yes_no_task(directory: Path, modules: list[tuple[str, Path]]) -> ScoreTask:
    for kind, folder in modules:
        if kind == "LogitScore":
            raw = read_as(folder / "config.json", LogitScore)
            no = -1 if raw.false_token_id is None else raw.false_token_id
            return ScoreTask("yes_no", _score_activation(directory, 1), 1, raw.true_token_id, no)
    path = directory / "tokenizer.json"
    vocabulary = read_vocabulary(path)
    if not isinstance(vocabulary, dict) or "yes" not in vocabulary or "no" not in vocabulary:
        raise ModelError(f'{path}: the vocabulary lacks "yes" or "no": this model cannot score by them')
    return ScoreTask("yes_no", "sigmoid", 1, vocabulary["yes"], vocabulary["no"])


def read_vocabulary(path: Path) -> dict[str, int] | list[Any]:
    """Of a tokenizer.json: ids by their texts, or a list of [text, score]. Raises ModelError."""
    return read_as(path, TokenizerFile).model.vocab


def _generate_task(directory: Path, config: ModelConfig) -> GenerateTask:
    """Ends of a text by generation_config.json, else by config.json, as transformers takes them."""
    if not config.causal:
        raise ModelError(
            f"{directory} is a {config.model_type} whose tokens see later ones, so it cannot generate: set "
            'task = "embed" to serve its pooled states, or task = "score" for a reranker that answers yes or no'
        )
    named = None
    for path in (directory / "generation_config.json", directory / "config.json"):
        named = (_optional(path, dict[str, Any]) or {}).get("eos_token_id")
        if named is not None:
            break
    ids = named if isinstance(named, list) else [] if named is None else [named]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < config.vocab_size:
            raise ModelError(f"{path}: eos_token_id {token_id!r} is outside the vocabulary of {config.vocab_size}")
    return GenerateTask(tuple(dict.fromkeys(ids)))


def _optional(path: Path, kind: type[T]) -> T | None:
    return read_as(path, kind) if path.exists() else None
