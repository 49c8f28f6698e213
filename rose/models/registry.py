"""Which class is which model: one line for each model_type and use."""

import importlib

from torch import nn

from rose.distributed.group import ALONE, Group
from rose.models.config import ModelConfig, ModelError
from rose.models.task import ScoreTask, Task

_MODELS = {
    ("bert", "embed"): "rose.models.bert:BertModel",
    ("bert", "classify"): "rose.models.bert:BertForSequenceClassification",
    ("roberta", "embed"): "rose.models.xlm_roberta:XlmRobertaModel",
    ("roberta", "classify"): "rose.models.xlm_roberta:XlmRobertaForSequenceClassification",
    ("xlm-roberta", "embed"): "rose.models.xlm_roberta:XlmRobertaModel",
    ("xlm-roberta", "classify"): "rose.models.xlm_roberta:XlmRobertaForSequenceClassification",
    ("llama", "generate"): "rose.models.llama:LlamaForCausalLM",
    ("qwen3", "generate"): "rose.models.qwen3:Qwen3ForCausalLM",
    ("qwen3", "embed"): "rose.models.qwen3:Qwen3Model",
    ("qwen3", "classify"): "rose.models.qwen3:Qwen3ForSequenceClassification",
    ("qwen3", "yes_no"): "rose.models.qwen3:Qwen3ForYesNo",
    ("bidirectional_pplx_qwen3", "embed"): "rose.models.qwen3:Qwen3Model",
}


def find_class(config: ModelConfig, task: Task) -> str:
    """Where the model's class is, as module:name. Raises ModelError if there is none."""
    place = _MODELS.get((config.model_type, task.kind))
    if place is None:
        raise ModelError(f"a {config.model_type} model cannot be served for {task.kind!r}")
    return place


def build_model(config: ModelConfig, task: Task, group: Group = ALONE) -> nn.Module:
    """The model, or this rank's part of it, its parameters not yet loaded, on the default device and dtype.

    Raises ModelError.
    """
    module, _, name = find_class(config, task).partition(":")
    model_class = getattr(importlib.import_module(module), name)
    arguments = (config, task) if isinstance(task, ScoreTask) else (config,)
    return model_class(*arguments, group=group)
