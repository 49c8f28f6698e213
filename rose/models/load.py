"""A model from its directory: built on the device in the dtype asked for, its weights streamed in."""

from pathlib import Path

import torch
from torch import nn

from rose.distributed.group import ALONE, Group
from rose.models.config import ModelConfig
from rose.models.registry import build_model
from rose.models.task import Task
from rose.weights.loader import load_weights, weight_files


def load_model(
    directory: Path,
    config: ModelConfig,
    task: Task,
    device: torch.device,
    dtype: torch.dtype,
    group: Group = ALONE,
    *,
    left_out: tuple[str, ...] = (),
) -> nn.Module:
    """Ready for forward passes, without gradients. Tensors whose names begin with one of `left_out` stay in the files.

    Raises ModelError, torch.OutOfMemoryError.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = build_model(config, task, group)
    finally:
        torch.set_default_dtype(default)
    load_weights(model, weight_files(directory), left_out=left_out)
    return model.requires_grad_(False).eval()
