"""Which sequences have passed their deadline, whether they wait or run. Time is an argument."""

import heapq

from scheduler.llm.sequence import Sequence

_SLACK = 1024  # entries of sequences that are done, before they are cleared away


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []  # (deadline, arrival, sequence)

    def add(self, sequence: Sequence, num_live: int) -> None:
        """`num_live` sequences are not done."""
        heapq.heappush(self._heap, (sequence.deadline, sequence.order[1], sequence))
        if len(self._heap) > 2 * num_live + _SLACK:
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)

    def pop(self, now: float) -> list[Sequence]:
        """Those not done whose deadline has passed since the last call."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if not sequence.done:
                passed.append(sequence)
        return passed
