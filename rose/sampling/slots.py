"""What a slot's sampling keeps on the device: its parameters, its lists of tokens, and, for penalties, its counts.

    table        int32 [S + 1, NUM_COLUMNS]       one line a slot (params.py); `floats` is the same memory
    bias_ids     int32 [S + 1, MAX_BIASES], bias_values float32, stop_ids int32 [S + 1, MAX_STOPS]: first entries count
    counts       int16 [S + 1, V rounded up to even]: bits 0-14 how often the slot put the token out, bit 15 whether
                 its prompt has it

The last line belongs to padding rows (slot negative, or S): greedy, without effect. `counts` costs 2 · V bytes a slot
(152 k tokens, 256 slots: 78 MB) and is allocated when the first slot needs it, or ahead by `reserve`; its address then
stays, so that captured graphs may hold it. A count saturates at about 2^14.
"""

import torch
from torch import Tensor

from ipc.types import SamplingParams
from rose.sampling.params import (
    MAX_BIASES,
    MAX_STOPS,
    NUM_COLUMNS,
    Needs,
    make_line,
)

IN_PROMPT = -(2**15)
COUNT_MASK = 2**15 - 1
COUNT_LIMIT = 2**14  # no more is added from here on; one launch adds less than as many again


class SamplingSlots:
    """Lines are written by copies on the current stream: after older steps, before younger ones."""

    def __init__(
        self, *, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._lines = max_num_seqs + 1
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = device
        self._eos_token_ids = eos_token_ids
        self._needs = [Needs()] * self._lines
        self.table = self._allocate(NUM_COLUMNS, torch.int32)
        self.floats = self.table.view(torch.float32)
        self.bias_ids = self._allocate(MAX_BIASES, torch.int32)
        self.bias_values = self._allocate(MAX_BIASES, torch.float32)
        self.stop_ids = self._allocate(MAX_STOPS, torch.int32)
        self.counts: Tensor | None = None

    def admit(self, slot: int, params: SamplingParams) -> None:
        """Raises UnusableParams, or what `reserve` raises; the slot is then as it was."""
        line, needs = make_line(params, self.vocab_size, self._eos_token_ids), Needs.of(params)
        if needs.penalties:
            self.reserve()
        self._needs[slot] = needs
        for target, values in (
            (self.table, line.table),
            (self.bias_ids, line.bias_ids),
            (self.bias_values, line.bias_values),
            (self.stop_ids, line.stop_ids),
        ):
            if len(values):
                # from pageable memory: the driver takes the bytes before it returns, nobody waits for the device
                target[slot, : len(values)].copy_(torch.from_numpy(values), non_blocking=True)
        if needs.penalties:
            assert self.counts is not None
            self.counts[slot].zero_()

    def reserve(self) -> None:
        """Allocates what penalties need, `counts_bytes`, unless it is there. Not while a graph is captured."""
        if self.counts is None:
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not capturing, "call reserve() before a step with penalties is captured"
            self.counts = self._allocate(self._row, torch.int16)

    @property
    def counts_bytes(self) -> int:
        return 2 * self._lines * self._row

    @property
    def _row(self) -> int:
        return self.vocab_size + self.vocab_size % 2  # kernels add to pairs

    def _allocate(self, width: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # so that it can be written in either mode
            return torch.zeros(self._lines, width, dtype=dtype, device=self.device)

    def needs(self, slots: list[int]) -> Needs:
        """Of a step with these rows; negative slots are padding."""
        return Needs.union(self._needs[slot] for slot in slots if slot >= 0)

    @property
    def any_penalties(self) -> bool:
        """Whether some slot, of a sequence that may have ended, counts its tokens."""
        return self.counts is not None and any(needs.penalties for needs in self._needs)

    def lines(self, slots: Tensor) -> Tensor:
        """Index of each slot's line, int64 [R]; padding gets the last."""
        slots = slots.long()
        return torch.where((slots < 0) | (slots > self.max_num_seqs), self.max_num_seqs, slots)
