"""The numbers of every live sequence as arrays, one line each, so that a step's decode rows are planned and applied
without a loop over them. A sequence keeps its lane from the door until it is done and its last row was answered.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scheduler.llm.sequence import Sequence

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
NOWHERE = -1  # generation of a sequence that is in no slot

_INTS = (
    *("slot", "generation", "num_blocks", "known", "limit", "first_end", "min_new", "max_new", "in_flight"),
    *("stepped", "num_steps", "compute_us"),
)
_FLAGS = ("decoding", "done", "ends_on_eos", "has_stops", "wants_logprobs")


class Lanes:
    """Grows with the number of live sequences. Arrays are replaced when it does: never keep one across `add`."""

    slot: Ints
    generation: Ints  # NOWHERE while it is in no slot
    num_blocks: Ints
    known: Ints  # tokens: prompt and answered output
    limit: Ints  # tokens at which it ends by length
    first_end: Ints  # tokens before the first that may end it otherwise (min_tokens)
    in_flight: Ints  # rows sent and not answered
    min_new: Ints  # tokens those rows will give at least
    max_new: Ints  # … and at most
    stepped: Ints  # the newest step with a row of it
    num_steps: Ints
    compute_us: Ints
    decoding: Flags  # in a slot, and all of its prefill has been sent
    done: Flags
    ends_on_eos: Flags
    has_stops: Flags
    wants_logprobs: Flags
    told_at: NDArray[np.float64]  # when it last got tokens; 0 before the first

    def __init__(self, capacity: int = 256) -> None:
        self.sequences: list[Sequence | None] = []
        self._free: list[int] = []
        for name in _INTS:
            setattr(self, name, np.zeros(0, np.int64))
        for name in _FLAGS:
            setattr(self, name, np.zeros(0, np.bool_))
        self.told_at = np.zeros(0, np.float64)
        self._grow(capacity)

    @property
    def num_used(self) -> int:
        return len(self.sequences) - len(self._free)

    def add(self, sequence: "Sequence") -> None:
        if not self._free:
            self._grow(2 * len(self.sequences))
        lane = sequence.lane = self._free.pop()
        self.sequences[lane] = sequence
        for name in (*_INTS, *_FLAGS, "told_at"):
            getattr(self, name)[lane] = 0
        params = sequence.params
        self.slot[lane] = self.generation[lane] = NOWHERE
        self.known[lane], self.limit[lane] = len(sequence.ids), sequence.limit
        self.first_end[lane] = sequence.num_prompt + params.min_tokens
        self.ends_on_eos[lane] = not params.ignore_eos
        self.has_stops[lane] = bool(sequence.stops)
        self.wants_logprobs[lane] = params.logprobs is not None

    def remove(self, lane: int) -> None:
        assert self.sequences[lane] is not None, f"lane {lane} freed twice"
        self.sequences[lane] = None
        self._free.append(lane)

    def at(self, lane: int) -> "Sequence":
        sequence = self.sequences[lane]
        assert sequence is not None
        return sequence

    def _grow(self, capacity: int) -> None:
        used = len(self.sequences)
        for name in (*_INTS, *_FLAGS, "told_at"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(capacity - used, array.dtype)]))
        self.sequences += [None] * (capacity - used)
        self._free += range(capacity - 1, used - 1, -1)
