"""The static device memory of an encoder's steps: what graphs read and write.

One set serves all steps: they run one after the other on one stream, and so do the copies between these buffers and
the slots of the ring.
"""

import torch
from torch import Tensor

from ipc.step_ring import ArrayField, encode_layout, field_offsets
from ipc.types import ModelFacts
from rose.graph_policy import padded_tokens

_VALUE_BYTES = 4  # the widest dtype


class StepBuffers:
    """`inputs` and `outputs` are laid out like a slot's regions; the other tensors are views into them, or made from
    them by a kernel: positions and token_types int32 [T]. T is padded."""

    def __init__(self, facts: ModelFacts, device: torch.device) -> None:
        layout = encode_layout(facts)
        num_tokens = padded_tokens(facts.max_num_batched_tokens)
        self._row_bytes = _VALUE_BYTES * facts.dimension
        (rows_at, offsets_at, self._ids_at), _ = field_offsets(layout.inputs)
        (status_at, self._values_at), num_output_bytes = field_offsets(layout.outputs)
        self.inputs = torch.zeros(self._ids_at + 4 * num_tokens, dtype=torch.uint8, device=device)
        self.outputs = torch.zeros(num_output_bytes, dtype=torch.uint8, device=device)
        rows, offsets, _ = layout.inputs
        self.rows = _int32(self.inputs, rows_at, rows)
        self.cu_seqlens = _int32(self.inputs, offsets_at, offsets)
        self.input_ids = self.inputs[self._ids_at :].view(torch.int32)
        self.positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.token_types = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.status = _int32(self.outputs, status_at, layout.outputs[0])
        self.values = self.outputs[self._values_at :]

    @property
    def region_bytes(self) -> tuple[int, int]:
        """Sizes of a slot's inputs and outputs, at least."""
        return len(self.inputs), len(self.outputs)

    def input_bytes(self, num_tokens: int) -> int:
        """How much of a slot's inputs a step of so many tokens uses."""
        return self._ids_at + 4 * num_tokens

    def output_bytes(self, num_seqs: int) -> int:
        """How much of a slot's outputs so many rows use, at most: they follow each other without gaps."""
        return self._values_at + num_seqs * self._row_bytes


def _int32(region: Tensor, offset: int, field: ArrayField) -> Tensor:
    return region[offset : offset + field.num_bytes].view(torch.int32).view(field.shape)
