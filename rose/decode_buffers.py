"""The static device memory of decode and verify steps: what their graphs read and write. See rose.step_buffers.

One set serves all steps: they run one after the other on one stream, and so do the copies between these buffers and
the slots of the ring.
"""

from typing import cast

import torch
from torch import Tensor

from ipc.step_ring import ArrayField, Arrays, field_offsets, generate_layout
from ipc.types import ModelFacts
from rose.cuda_stream import Bytes
from rose.graph_policy import GraphKey
from rose.kernels.slot_rows import DecodeRows, RowOutputs

_ROW_BYTES = 32  # a line of the table of rows
_DTYPES = {"int32": torch.int32, "float32": torch.float32, "uint8": torch.uint8}


class DecodeBuffers:
    """`outputs` is laid out like a slot's region; everything else is made from `table` and the slots by a kernel.

    N = max_num_seqs, k = max_draft_tokens. `max_blocks`: entries of a slot's block table.
    """

    def __init__(self, facts: ModelFacts, max_blocks: int, device: torch.device) -> None:
        layout = generate_layout(facts)
        num_rows, width = facts.max_num_seqs, facts.max_draft_tokens + 1
        offsets, _ = field_offsets(layout.inputs)
        self._rows_at = dict(zip((field.name for field in layout.inputs), offsets, strict=True))["rows"]
        offsets, num_bytes = field_offsets(layout.outputs)
        ends = dict(zip((field.name for field in layout.outputs), [*offsets[1:], num_bytes], strict=True))
        self._brief_bytes, self._all_bytes = ends["logprobs"], ends["top_logprobs"]
        self.outputs = torch.zeros(self._all_bytes, dtype=torch.uint8, device=device)
        self._outputs = {
            field.name: _view(self.outputs, offset, field)
            for field, offset in zip(layout.outputs, offsets, strict=True)
            if offset < ends["top_logprobs"]
        }
        self.logprobs, self.top_ids, self.top_logprobs = (
            self._outputs[name] for name in ("logprobs", "top_ids", "top_logprobs")
        )
        self.table = torch.zeros(num_rows, 8, dtype=torch.int32, device=device)
        self.table_bytes = self.table.view(torch.uint8).view(-1)
        self._per_row = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        self._per_token = torch.zeros(8, num_rows * width, dtype=torch.int32, device=device)
        self._cu_seqlens_q = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.ones = torch.ones(num_rows, dtype=torch.int32, device=device)
        self.zeros = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def rows(self, key: GraphKey) -> DecodeRows:
        """Views of a key's rows: the first of each buffer."""
        num_rows, num_tokens = key.num_seqs, key.num_tokens
        slots, kv_lengths = self._per_row[:, :num_rows]
        input_ids, positions, slot_mapping, next_ids, *of_places = self._per_token[:, :num_tokens]
        return DecodeRows(
            self.table[:num_rows],
            slots,
            input_ids,
            positions,
            slot_mapping,
            next_ids,
            self._cu_seqlens_q[: num_rows + 1],
            kv_lengths,
            self._block_table[:num_rows],
            *of_places,
        )

    def row_outputs(self, num_rows: int) -> RowOutputs:
        return RowOutputs(*(self._outputs[name][:num_rows] for name in RowOutputs._fields))

    def slot_table(self, arrays: Arrays, num_rows: int) -> Bytes:
        """The lines of so many rows in a step's slot: what `table_bytes` begins with."""
        return cast(Bytes, arrays["inputs"][self._rows_at : self._rows_at + _ROW_BYTES * num_rows])

    def output_bytes(self, *, logprobs: bool) -> int:
        """How much of a slot's outputs a step uses."""
        return self._all_bytes if logprobs else self._brief_bytes


def _view(region: Tensor, offset: int, field: ArrayField) -> Tensor:
    return region[offset : offset + field.num_bytes].view(_DTYPES[field.dtype]).view(field.shape)
