"""onnxruntime in this process: the model exported here, with onnxruntime's own BERT fusions, float32.

Tokenising, sorting by length, mean pooling and normalising are done around it as a user of it would.
"""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.transformers.optimizer import optimize_model
from transformers import AutoModel

from bench.peers import Setup
from bench.workloads import load_tokenizer

INPUTS = ["input_ids", "attention_mask"]


class OnnxRuntime:
    label = f"onnxruntime {onnxruntime.__version__}"
    batch_sizes = (16, 32, 64)

    @contextmanager
    def launch(self, setup: Setup) -> Iterator[None]:
        self._tokenizer = load_tokenizer(setup.model_dir)
        self._tokenizer.enable_truncation(setup.max_length)
        self._tokenizer.enable_padding()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = setup.num_threads
        with tempfile.TemporaryDirectory() as directory:
            path = export(setup.model_dir, Path(directory))
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        yield
        del self._session

    def encode(self, texts: list[str], batch_size: int) -> NDArray[np.float32]:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        parts = [
            self._forward([texts[index] for index in order[start : start + batch_size]])
            for start in range(0, len(texts), batch_size)
        ]
        vectors = np.empty((len(texts), parts[0].shape[1]), np.float32)
        vectors[order] = np.concatenate(parts)
        return vectors

    def _forward(self, texts: list[str]) -> NDArray[np.float32]:
        encodings = self._tokenizer.encode_batch(texts)
        input_ids = np.array([encoding.ids for encoding in encodings], np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        hidden = self._session.run(None, dict(zip(INPUTS, (input_ids, mask), strict=True)))[0]
        weights = mask[:, :, None].astype(np.float32)
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        return np.asarray(pooled / np.linalg.norm(pooled, axis=1, keepdims=True), np.float32)


class _HiddenStates(torch.nn.Module):
    """input_ids, attention_mask [batch, length] → last hidden states [batch, length, hidden]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def export(model_dir: Path, target: Path) -> Path:
    """Writes model.onnx, and beside it the fused form that is returned. The fusions know the unfused attention."""
    model = AutoModel.from_pretrained(str(model_dir), attn_implementation="eager")
    input_ids = torch.randint(1000, 2000, (2, 16))
    mask = torch.ones_like(input_ids)
    mask[1, 10:] = 0  # a mask of ones alone would be traced away
    axes = {name: {0: "batch", 1: "length"} for name in [*INPUTS, "hidden"]}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the tracer's remarks, and that a newer exporter exists
        torch.onnx.export(
            _HiddenStates(model).eval(),
            (input_ids, mask),
            str(target / "model.onnx"),
            input_names=INPUTS,
            output_names=["hidden"],
            dynamic_axes=axes,
            opset_version=18,
            dynamo=False,
        )
    heads, hidden = model.config.num_attention_heads, model.config.hidden_size
    optimized = optimize_model(
        str(target / "model.onnx"), model_type="bert", num_heads=heads, hidden_size=hidden, opt_level=0
    )
    optimized.save_model_to_file(str(target / "fused.onnx"))
    return target / "fused.onnx"
