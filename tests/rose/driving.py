"""Drives an encoder's runner in this process: sequences in, vectors or scores out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ipc.step import ROW_DIMENSIONS, ROW_DTYPE, ROW_NORMALIZE, ROW_OUTPUT_OFFSET, ROW_POOLING, ROW_TYPE_START, StepPlan
from ipc.step_ring import Arrays, encode_layout, local_slots
from rose.batch import write_plain_rows
from rose.config import RankConfig
from rose.encoder_loader import EncoderLoader
from rose.model_runner import ModelRunner
from rose.runner import LazyTensor

COLUMNS = {
    "type_starts": ROW_TYPE_START,
    "pooling": ROW_POOLING,
    "dtype": ROW_DTYPE,
    "dimensions": ROW_DIMENSIONS,
    "normalize": ROW_NORMALIZE,
    "offsets": ROW_OUTPUT_OFFSET,
}


class Driver:
    """One runner and its slots. Steps may overlap: `launch` twice, then `wait`."""

    def __init__(
        self, directory: Path, *, runner: Any = None, slots: list[Arrays] | None = None, **settings: Any
    ) -> None:
        """`runner`, with the slots it reads, in the place of one that is loaded here."""
        if runner is None:
            config = RankConfig(**{"device": "cpu", "num_threads": 1} | settings)
            runner = ModelRunner(EncoderLoader("test", directory, config))
            runner.load()
        self.runner = runner
        self.facts = self.runner.facts
        self.slots = local_slots(encode_layout(self.facts)) if slots is None else slots
        self._step = 0

    def launch(self, sequences: Sequence[Sequence[int]], slot: int = 0, **columns: Any) -> tuple[LazyTensor, Arrays]:
        arrays = self.slots[slot]
        lengths = [len(sequence) for sequence in sequences]
        arrays["input_ids"][: sum(lengths)] = np.concatenate([np.asarray(s, np.int32) for s in sequences])
        write_plain_rows(arrays, lengths, self.facts.dimension)
        for name, values in columns.items():
            arrays["rows"][: len(lengths), COLUMNS[name]] = values
        arrays["status"][:] = -1
        arrays["values"][:] = 255
        self._step += 1
        plan = StepPlan(
            epoch=1, step=self._step, slot=slot, kind="encode", num_seqs=len(lengths), num_tokens=sum(lengths)
        )
        return self.runner.step(plan, arrays), arrays

    def run(self, sequences: Sequence[Sequence[int]], **columns: Any) -> Arrays:
        """One step from beginning to end; the slot it lies in."""
        lazy, arrays = self.launch(sequences, **columns)
        self.runner.drain()
        assert lazy.ready()
        return arrays

    def vectors(self, sequences: Sequence[Sequence[int]], **columns: Any) -> NDArray[np.float32]:
        """float32 [N, dimension]; every row must have status 0."""
        arrays = self.run(sequences, **columns)
        assert arrays["status"][: len(sequences)].tolist() == [0] * len(sequences)
        return self.read(arrays, len(sequences))

    def read(self, arrays: Arrays, num_rows: int) -> NDArray[np.float32]:
        width = 4 * self.facts.dimension
        return arrays["values"][: num_rows * width].view(np.float32).reshape(num_rows, -1).copy()

    def close(self) -> None:
        self.runner.close()


def ragged_ids(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random ids that are no special ones."""
    random = np.random.default_rng(seed)
    return [random.integers(5, vocab_size, size=length).tolist() for length in lengths]
