"""An encoder on one device: packed rows of a slot in, their bytes and status in the slot out.

Knows neither processes nor threads. Everything here is a launch: on a GPU nothing waits for the device.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ipc.step import STATUS_BAD_TOKEN, STATUS_NON_FINITE
from rose.attention.interface import AttentionBackend
from rose.batch import Rows, encode_batch
from rose.distributed.group import ALONE, Group
from rose.layers.activation import Activation, activation
from rose.layers.linear import Linear
from rose.models.config import ModelConfig
from rose.models.load import load_model
from rose.models.task import DenseSpec, EmbedTask, ScoreTask
from rose.pooling import OutputDefaults, RowGroup, convert, group_rows, pool
from rose.weights.loader import load_weights, weight_files


class EncoderParts(NamedTuple):
    """A loaded model; `head` follows in float32: projections of pooled vectors, or the activation of scores."""

    model: nn.Module
    head: Activation | nn.Sequential
    task: EmbedTask | ScoreTask

    @property
    def defaults(self) -> OutputDefaults:
        task = self.task
        if isinstance(task, ScoreTask):
            return OutputDefaults("cls", task.num_labels, False, "scaled")
        return OutputDefaults(task.pooling, task.dimension, task.normalize, task.int8)


class Encoder:
    """Runs steps as they are, in torch's own operators: on CPU, and as the reference of everything else."""

    def __init__(
        self, parts: EncoderParts, attention: AttentionBackend, device: torch.device, group: Group = ALONE
    ) -> None:
        self._model, self._head, task = parts
        self._attention = attention
        self._device = device
        self._pools = isinstance(task, EmbedTask)
        self._defaults = parts.defaults
        self._leads = group.leads

    def run(self, rows: Rows) -> None:
        """Forward pass of `rows`, results into its `status` and `values`; the leader's, of a group."""
        batch = encode_batch(rows, self._device)
        output = self._model(batch, self._attention.ragged(batch.sequences))
        if not self._leads:
            return
        failed = torch.from_numpy(rows.bad_tokens).to(self._device, non_blocking=True).to(torch.int32)
        failed.mul_(STATUS_BAD_TOKEN)
        pooled: dict[str, Tensor] = {}
        for group in group_rows(rows.table, self._defaults):
            vectors = pooled.get(group.pooling)
            if vectors is None:
                vectors = self._head(pool(output, batch.sequences, group.pooling) if self._pools else output.float())
                pooled[group.pooling] = vectors
                failed.masked_fill_(~vectors.isfinite().all(dim=-1) & (failed == 0), STATUS_NON_FINITE)
            _write(group, vectors, failed, self._defaults, rows.values)
        rows.status.copy_(failed, non_blocking=True)


def load_encoder(
    directory: Path,
    config: ModelConfig,
    task: EmbedTask | ScoreTask,
    device: torch.device,
    dtype: torch.dtype,
    group: Group = ALONE,
) -> EncoderParts:
    """Builds the model on `device` and streams its weights. Raises ModelError."""
    model = load_model(directory, config, task, device, dtype, group)
    with device:
        head = _build_head(task)
    return EncoderParts(model, head, task)


def _build_head(task: EmbedTask | ScoreTask) -> Activation | nn.Sequential:
    if isinstance(task, ScoreTask):
        return activation(task.act)
    return nn.Sequential(*(_load_dense(spec) for spec in task.dense)).requires_grad_(False)


def _load_dense(spec: DenseSpec) -> nn.Module:
    layer = Linear(spec.in_features, spec.out_features, bias=spec.bias, act=spec.act)
    layer.prefixes = ("linear.",)  # type: ignore[assignment]
    load_weights(layer, weight_files(spec.directory))
    return layer


def _write(group: RowGroup, vectors: Tensor, failed: Tensor, defaults: OutputDefaults, values: Tensor) -> None:
    """Puts a group's rows at their offsets: in one copy where they follow each other without gaps."""
    if len(group.rows) != len(vectors):
        index = torch.from_numpy(np.asarray(group.rows)).to(vectors.device, non_blocking=True)
        vectors, failed = vectors[index], failed[index]
    block = convert(vectors, group, defaults.int8).masked_fill_(failed[:, None] != 0, 0)
    num_rows, row_bytes = block.shape
    offsets = group.offsets
    if (np.diff(offsets) == row_bytes).all():
        first = int(offsets[0])
        values[first : first + num_rows * row_bytes].view(num_rows, row_bytes).copy_(block, non_blocking=True)
        return
    for row, offset in enumerate(offsets.tolist()):
        values[offset : offset + row_bytes].copy_(block[row], non_blocking=True)
