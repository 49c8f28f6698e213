"""Encoders with random weights made on the device, and steps for them: shapes to be timed, no files."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing, encode_layout
from ipc.types import ModelFacts
from rose.batch import write_plain_rows
from rose.config import RankConfig
from rose.cuda_encoder import CudaEncoder
from rose.encoder import EncoderParts
from rose.models.config import ModelConfig
from rose.models.registry import build_model
from rose.models.task import EmbedTask
from rose.runner import LazyTensor

DEVICE = torch.device("cuda")


class Shape(NamedTuple):
    name: str
    model: ModelConfig
    task: EmbedTask


def _qwen3(name: str, *, pplx: bool) -> Shape:
    model = ModelConfig(
        architecture="Qwen3Model",
        model_type="bidirectional_pplx_qwen3" if pplx else "qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        norm_eps=1e-6,
        max_position_embeddings=32768,
        causal=not pplx,
        gated=True,
        rope_theta=1e6,
        attention_bias=False,
        tie_word_embeddings=True,
    )
    pooling = "mean" if pplx else "last_token"
    return Shape(name, model, EmbedTask(pooling, (), not pplx, "tanh" if pplx else "scaled", 1024))


def _bert(name: str, num_layers: int, pooling: str) -> Shape:
    model = ModelConfig(
        architecture="BertModel",
        model_type="bert",
        vocab_size=30522,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=32,
        hidden_act="gelu",
        norm_eps=1e-12,
        max_position_embeddings=512,
        type_vocab_size=2,
    )
    return Shape(name, model, EmbedTask(pooling, (), True, "scaled", 384))  # type: ignore[arg-type]


SHAPES = {
    shape.name: shape
    for shape in (
        _qwen3("qwen3-embedding-0.6b", pplx=False),
        _qwen3("pplx-embed-0.6b", pplx=True),
        _bert("minilm-l6", 6, "mean"),
        _bert("bge-small", 12, "cls"),
    )
}


class Bench:
    """A CudaEncoder on a page-locked ring, driven step by step."""

    def __init__(
        self,
        shape: Shape,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int = 256,
        shapes: Path | None = None,
        **settings: object,
    ) -> None:
        self.shape = shape
        self.facts = ModelFacts(
            name=shape.name,
            architecture=shape.model.architecture,
            task="embed",
            vocab_size=shape.model.vocab_size,
            max_model_len=min(shape.model.max_position_embeddings, max_num_batched_tokens),
            dimension=shape.task.dimension,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            dtype="bfloat16",
            pooling=shape.task.pooling,
            normalize=shape.task.normalize,
            device="cuda",
        )
        config = RankConfig(**{"capture": "lazy", "max_graph_tokens": max_num_batched_tokens, **settings})  # type: ignore[arg-type]
        self.encoder = CudaEncoder(
            _random_parts(shape), shape.model, self.facts, config, device=DEVICE, dtype=torch.bfloat16, shapes=shapes
        )
        self.ring = StepRing.create(encode_layout(self.facts))
        self.encoder.attach(self.ring)
        self._step = 0

    def fill(self, lengths: list[int], slot: int = 0) -> None:
        """Fresh random ids of `lengths`."""
        arrays = self.ring.slot(slot)
        arrays["input_ids"][: sum(lengths)] = np.random.default_rng(slot).integers(
            0, self.facts.vocab_size, sum(lengths), dtype=np.int32
        )
        write_plain_rows(arrays, lengths, self.facts.dimension)

    def launch(self, lengths: list[int], slot: int = 0) -> LazyTensor:
        self._step += 1
        plan = StepPlan(0, self._step, slot, "encode", len(lengths), sum(lengths))
        return self.encoder.encode(plan, self.ring.slot(slot))

    def run(self, lengths: list[int], slot: int = 0) -> Arrays:
        lazy = self.launch(lengths, slot)
        while not lazy.ready():
            pass
        return self.ring.slot(slot)

    def close(self) -> None:
        self.encoder.attach(None)
        self.ring.close()


def _random_parts(shape: Shape) -> EncoderParts:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            model = build_model(shape.model, shape.task)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.0, 0.1)
                if name.endswith("weight"):
                    parameter.add_(1.0)
            else:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    return EncoderParts(model.requires_grad_(False).eval(), torch.nn.Sequential(), shape.task)
