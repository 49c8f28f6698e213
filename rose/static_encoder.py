"""An encoder over static device buffers: everything of one step that lies between its two copies.

Only launches, sizes from the key alone: so it can be captured. Runs on any device that Triton's kernels run on.
"""

import torch
from torch import Tensor, nn

from rose.attention.interface import Attend, Sequences
from rose.batch import EncodeBatch
from rose.graph_policy import GraphKey
from rose.kernels.pooling import Defaults, convert_rows, pool_rows, pool_vectors
from rose.kernels.step_inputs import step_inputs
from rose.layers.activation import Activation
from rose.pooling import OutputDefaults
from rose.step_buffers import StepBuffers


class StaticEncoder:
    """`pools`: the model gives hidden states [T, H]; else scores [N, D]. `head` follows in float32, if not None."""

    def __init__(
        self,
        model: nn.Module,
        head: Activation | nn.Module | None,
        buffers: StepBuffers,
        defaults: OutputDefaults,
        *,
        pools: bool,
        has_token_types: bool,
    ) -> None:
        self._model = model
        self._head = head
        self._buffers = buffers
        self._pools = pools
        self._has_token_types = has_token_types
        self._defaults = Defaults(defaults.pooling, defaults.normalize, defaults.int8 == "tanh")

    @torch.inference_mode()
    def forward(self, key: GraphKey, attend: Attend) -> None:
        """Enqueues a step: from `inputs` of the buffers to their `outputs`."""
        buffers, num_seqs, num_tokens = self._buffers, key.num_seqs, key.num_tokens
        rows, cu_seqlens = buffers.rows[:num_seqs], buffers.cu_seqlens[: num_seqs + 1]
        positions, token_types = buffers.positions[:num_tokens], buffers.token_types[:num_tokens]
        status = buffers.status[:num_seqs]
        step_inputs(rows, cu_seqlens, positions, token_types, status)
        batch = EncodeBatch(
            input_ids=buffers.input_ids[:num_tokens],
            positions=positions,
            token_types=token_types if self._has_token_types else None,
            sequences=Sequences([], cu_seqlens),
        )
        output = self._model(batch, attend)
        if self._pools and self._head is None:
            pool_rows(output, cu_seqlens, rows, status, buffers.values, self._defaults)
            return
        vectors = self._vectors(output, cu_seqlens, rows)
        convert_rows(vectors, cu_seqlens, rows, status, buffers.values, self._defaults)

    def _vectors(self, output: Tensor, cu_seqlens: Tensor, rows: Tensor) -> Tensor:
        """float32 [N, D]."""
        vectors = pool_vectors(output, cu_seqlens, rows, self._defaults) if self._pools else output.float()
        return vectors if self._head is None else self._head(vectors).contiguous()
