"""The shared memory between a scheduler and its ranks: a few slots, each the arrays of one step.

    memfd (sealed against resizing)         one slot                      offsets are multiples of 64
    ┌────────┬────────┬─ … ─┬────────┐     ┌────────┬──────────────────┬───────────────────┐
    │ slot 0 │ slot 1 │     │ slot n │     │ header │ inputs           │ outputs           │
    └────────┴────────┴─ … ─┴────────┘     └────────┴──────────────────┴───────────────────┘
    header: uint64 {magic, epoch, step, num_seqs, num_tokens}

Ownership: the scheduler makes one ring per epoch and alone decides which slot is free. It writes inputs and
header, then sends the StepPlan; from then until the StepResult the slot belongs to the ranks, which write
outputs. The messages are the hand-over (a system call pair is the fence): nobody polls a flag in here. A slot
is used again when its step is answered; a ring is dropped whole when its epoch ends.

A memfd has no name to leak, survives its owner's death for those who mapped it, and cannot be shrunk under a
reader. In one process (bulk jobs, tests) `local_slots` gives the same arrays without shared memory.
"""

import contextlib
import fcntl
import math
import mmap
import os
from collections.abc import Mapping
from itertools import accumulate
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ipc.types import Count, ModelFacts

MAGIC = 0x426F757175657431
ALIGN = 64
HEADER_BYTES = 64
MIN_PARAMS_BYTES = 256 << 10  # of a generate slot: what the largest grammar may take
MAX_PROMPT_LOGPROBS = 1024  # prompt tokens of one step that can answer logprobs
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Arrays = Mapping[str, NDArray[np.generic]]


class RingError(RuntimeError):
    """A ring or slot that is not what its messages say: wrong size, epoch or step."""


class ArrayField(Struct, frozen=True):
    """One array of a slot."""

    name: str
    dtype: Literal["uint8", "int32", "float32"]
    shape: tuple[Count, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class RingLayout(Struct, frozen=True):
    """The arrays of every slot, inputs first, and the number of slots."""

    num_slots: Count
    inputs: tuple[ArrayField, ...]
    outputs: tuple[ArrayField, ...]

    @property
    def slot_bytes(self) -> int:
        return HEADER_BYTES + sum(_aligned(f.num_bytes) for f in self.inputs + self.outputs)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


def encode_layout(facts: ModelFacts) -> RingLayout:
    """Slots of an encoder. T = max_num_batched_tokens, N = max_num_seqs, D = dimension.

    inputs:  rows int32 [N, 8] (columns: ipc.step) · cu_seqlens int32 [N+1] · input_ids int32 [T] packed
    outputs: status int32 [N] · values uint8 [N·D·4], each row at its `ROW_OUTPUT_OFFSET`

    What is longest comes last, so that a rank copies the used part of either region in one piece. A rank may write
    offsets of empty sequences behind the last one, and ROW_STATUS.
    """
    n, t = facts.max_num_seqs, facts.max_num_batched_tokens
    return RingLayout(
        num_slots=facts.num_steps_in_flight + 2,
        inputs=(
            ArrayField("rows", "int32", (n, 8)),
            ArrayField("cu_seqlens", "int32", (n + 1,)),
            ArrayField("input_ids", "int32", (t,)),
        ),
        outputs=(
            ArrayField("status", "int32", (n,)),
            ArrayField("values", "uint8", (n * facts.dimension * 4,)),
        ),
    )


def generate_layout(facts: ModelFacts) -> RingLayout:
    """Slots of a decoder. T = max_num_batched_tokens, N = max_num_seqs, L = max_model_len, k = max_draft_tokens,
    M = max_logprobs, B = N · (3 + k / 16) + (T + L) / block_size, P = min(T, 1024).

    inputs:  input_ids int32 [T + N + L], the ids of prefill rows and of prefix hits · tables (columns: ipc.step)
             rows int32 [N, 8], admissions int32 [N, 8], new_blocks int32 [B, 3], releases int32 [N, 2] · params
             uint8, the msgpack SamplingParams of admissions
    outputs: status int32 [N] · num_tokens int32 [N], tokens each row got · tokens int32 [N, k+1], accepted drafts,
             then one more · num_drafts int32 [N], drafts verified · lengths int32 [N], tokens the slot then holds ·
             logprobs float32 [N, k+1], top_ids int32 and top_logprobs float32 [N, k+1, M], for `tokens` · the same
             for prompt tokens: prompt_logprobs [P], prompt_top_ids, prompt_top_logprobs [P, M], one line for every
             prefill token of a row whose params ask for it, in the order of rows: how likely the next token was

    A sequence whose params do not fit MIN_PARAMS_BYTES can never run; what does not fit a step's tables waits for
    the next.
    """
    n, t, k, m = facts.max_num_seqs, facts.max_num_batched_tokens, facts.max_draft_tokens, facts.max_logprobs
    num_prompt_logprobs = min(t, MAX_PROMPT_LOGPROBS)
    num_blocks = n * (3 + k // 16) + (t + facts.max_model_len) // facts.block_size
    return RingLayout(
        num_slots=facts.num_steps_in_flight + 2,
        inputs=(
            ArrayField("input_ids", "int32", (t + n + facts.max_model_len,)),
            ArrayField("rows", "int32", (n, 8)),
            ArrayField("admissions", "int32", (n, 8)),
            ArrayField("new_blocks", "int32", (num_blocks, 3)),
            ArrayField("releases", "int32", (n, 2)),
            ArrayField("params", "uint8", (max(n * 1024, MIN_PARAMS_BYTES),)),
        ),
        outputs=(
            ArrayField("status", "int32", (n,)),
            ArrayField("num_tokens", "int32", (n,)),
            ArrayField("tokens", "int32", (n, k + 1)),
            ArrayField("num_drafts", "int32", (n,)),
            ArrayField("lengths", "int32", (n,)),
            ArrayField("logprobs", "float32", (n, k + 1)),
            ArrayField("top_ids", "int32", (n, k + 1, m)),
            ArrayField("top_logprobs", "float32", (n, k + 1, m)),
            ArrayField("prompt_logprobs", "float32", (num_prompt_logprobs,)),
            ArrayField("prompt_top_ids", "int32", (num_prompt_logprobs, m)),
            ArrayField("prompt_top_logprobs", "float32", (num_prompt_logprobs, m)),
        ),
    )


def layout_for(facts: ModelFacts) -> RingLayout:
    return generate_layout(facts) if facts.task == "generate" else encode_layout(facts)


class StepRing:
    """A mapped ring. `create` makes and owns one, `attach` maps another process's."""

    def __init__(self, fd: int, layout: RingLayout) -> None:
        self.fd = fd
        self.layout = layout
        self._map: mmap.mmap | None = mmap.mmap(fd, layout.num_bytes)
        buffer = self.memory
        self._headers: list[NDArray[np.uint64]] = []
        self._slots: list[Arrays] = []
        for index in range(layout.num_slots):
            slot = buffer[index * layout.slot_bytes : (index + 1) * layout.slot_bytes]
            self._headers.append(slot[:HEADER_BYTES].view(np.uint64))
            self._slots.append(_views(slot[HEADER_BYTES:], layout))

    @classmethod
    def create(cls, layout: RingLayout) -> "StepRing":
        """A new ring. Raises OSError (ENOMEM/ENOSPC) where the memory is not to be had."""
        fd = os.memfd_create("bouquet-step-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.num_bytes)
            os.posix_fallocate(fd, 0, layout.num_bytes)  # now, not as a SIGBUS later
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, layout)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, layout: RingLayout) -> "StepRing":
        """Maps a ring received from its owner; takes over `fd`. Raises RingError if it is not `layout`'s."""
        try:
            size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if size != layout.num_bytes or seals & _SEALS != _SEALS:
                raise RingError(f"ring of {size} bytes (seals {seals:#x}), expected {layout.num_bytes}, sealed")
            return cls(fd, layout)
        except BaseException:
            os.close(fd)
            raise

    def slot(self, index: int) -> Arrays:
        """The arrays of slot `index`, as views of the shared memory. Raises RingError where there is no such slot."""
        self._check_index(index)
        return self._slots[index]

    def write_header(self, index: int, epoch: int, step: int, num_seqs: int, num_tokens: int) -> None:
        self._check_index(index)
        self._headers[index][:5] = (MAGIC, epoch, step, num_seqs, num_tokens)

    def check_header(self, index: int, epoch: int, step: int) -> tuple[int, int]:
        """The slot's (num_seqs, num_tokens). Raises RingError unless it holds `step` of `epoch`."""
        self._check_index(index)
        magic, its_epoch, its_step, num_seqs, num_tokens = self._headers[index][:5].tolist()
        if (magic, its_epoch, its_step) != (MAGIC, epoch, step):
            raise RingError(f"slot {index} holds epoch {its_epoch:#x} step {its_step}, not {epoch:#x} step {step}")
        return num_seqs, num_tokens

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The whole mapping, to be page-locked."""
        assert self._map is not None, "the ring is closed: take `memory` before"
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Unmaps, once every view handed out is gone: numpy keeps mapping (and one descriptor) alive until then."""
        self._headers, self._slots = [], []
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a caller still holds a view; the mapping goes with the last one
                mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self._slots):  # a negative one would pick another step's slot
            raise RingError(f"no slot {index} in a ring of {len(self._slots)}")


def local_slots(layout: RingLayout) -> list[Arrays]:
    """Slots without shared memory, for one process."""
    num_bytes = layout.slot_bytes - HEADER_BYTES
    return [_views(np.zeros(num_bytes, np.uint8), layout) for _ in range(layout.num_slots)]


def field_offsets(fields: tuple[ArrayField, ...]) -> tuple[list[int], int]:
    """Where in its region each of `fields` begins, and the region's size; bytes."""
    offsets = list(accumulate((_aligned(field.num_bytes) for field in fields), initial=0))
    return offsets[:-1], offsets[-1]


def _views(memory: NDArray[np.uint8], layout: RingLayout) -> dict[str, NDArray[np.generic]]:
    """Every field by name, and both regions whole: `inputs` and `outputs`, uint8."""
    arrays: dict[str, NDArray[np.generic]] = {}
    begin = 0
    for name, fields in (("inputs", layout.inputs), ("outputs", layout.outputs)):
        offsets, num_bytes = field_offsets(fields)
        region = memory[begin : begin + num_bytes]
        arrays[name] = region
        for field, offset in zip(fields, offsets, strict=True):
            flat = region[offset : offset + field.num_bytes].view(np.dtype(field.dtype))
            arrays[field.name] = flat.reshape(field.shape)
        begin += num_bytes
    return arrays


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
