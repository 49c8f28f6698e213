"""An encoder in this process, for bulk jobs: token ids in, vectors or scores out. No scheduler, no sockets."""

import select
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ipc.step import STATUS_OK, StepPlan
from ipc.step_ring import Arrays, encode_layout, local_slots
from rose.batch import write_plain_rows
from rose.config import RankConfig
from rose.encoder_loader import EncoderLoader
from rose.model_runner import ModelRunner
from rose.runner import LazyTensor


class OfflineEncoder:
    """Runs an encoder over any number of sequences, as many steps in flight as it allows."""

    def __init__(self, directory: Path, config: RankConfig | None = None) -> None:
        """Loads the model in `directory`. Raises ModelError."""
        self._runner = ModelRunner(EncoderLoader(directory.name, directory, config or RankConfig()))
        self.facts = self._runner.load()
        self._slots = local_slots(encode_layout(self.facts))

    def encode(self, sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """float32 [len(sequences), dimension], as the model's files want them.

        Raises ValueError, naming the sequence, for one that is empty, too long, or that the model cannot take.
        """
        limit = self.facts.max_model_len
        for index, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= limit:
                raise ValueError(f"sequence {index} has {len(sequence)} tokens: 1 to {limit} are possible")
        vectors = np.empty((len(sequences), self.facts.dimension), np.float32)
        in_flight: deque[tuple[slice, LazyTensor, Arrays]] = deque()
        try:
            for step, rows in enumerate(self._steps([len(sequence) for sequence in sequences])):
                if len(in_flight) == self.facts.num_steps_in_flight:
                    _collect(*in_flight.popleft(), vectors)
                in_flight.append((rows, *self._launch(step, sequences[rows])))
            while in_flight:
                _collect(*in_flight.popleft(), vectors)
        finally:
            self._runner.drain()  # after an error: no step may outlive its call
            for _, lazy, _ in in_flight:
                lazy.ready()
        return vectors

    def close(self) -> None:
        self._runner.close()

    def _steps(self, lengths: list[int]) -> Iterator[slice]:
        """Consecutive sequences that fit one step."""
        first = tokens = 0
        for index, length in enumerate(lengths):
            if tokens + length > self.facts.max_num_batched_tokens or index - first == self.facts.max_num_seqs:
                yield slice(first, index)
                first, tokens = index, 0
            tokens += length
        if lengths:
            yield slice(first, len(lengths))

    def _launch(self, step: int, sequences: Sequence[Sequence[int]]) -> tuple[LazyTensor, Arrays]:
        slot = step % len(self._slots)
        arrays, lengths = self._slots[slot], [len(sequence) for sequence in sequences]
        num_tokens = sum(lengths)
        arrays["input_ids"][:num_tokens] = np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences])
        write_plain_rows(arrays, lengths, self.facts.dimension)
        plan = StepPlan(0, step, slot, "encode", len(lengths), num_tokens)
        return self._runner.step(plan, arrays), arrays


def _collect(rows: slice, lazy: LazyTensor, arrays: Arrays, vectors: NDArray[np.float32]) -> None:
    """Waits for a step and takes its rows. Raises ValueError for a row that failed."""
    while not lazy.ready():
        if lazy.fileno() < 0:
            time.sleep(1e-4)
        else:
            select.select([lazy.fileno()], [], [])
    part = vectors[rows]
    failed = np.flatnonzero(arrays["status"][: len(part)] != STATUS_OK)
    if len(failed):
        raise ValueError(f"sequence {rows.start + failed[0]} has a token outside the vocabulary, or no finite result")
    part[:] = arrays["values"][: part.nbytes].view(np.float32).reshape(part.shape)
