"""Which class is which model: one line for each (model_type, task)."""

import importlib

from torch import nn

from rose.models.config import ModelConfig, ModelError
from rose.models.task import EmbedTask, ScoreTask

_MODELS = {
    ("bert", "embed"): "rose.models.bert:BertModel",
}


def build_model(config: ModelConfig, task: EmbedTask | ScoreTask) -> nn.Module:
    """The model, parameters not yet loaded, on the current default device and dtype. Raises ModelError."""
    kind = task.kind if isinstance(task, ScoreTask) else "embed"
    place = _MODELS.get((config.model_type, kind))
    if place is None:
        raise ModelError(f"a {config.model_type} model cannot be served for {kind!r}")
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)(config)  # type: ignore[no-any-return]
