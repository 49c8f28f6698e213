"""Sequences that were in flight when ranks died: each runs alone until it is cleared or convicted, the oldest first.

A generation is cleared by its replayed prefill and one decode step. Keeps the order and who is on trial; strikes are
kept by the quarantine, the verdict is the planner's.
"""

from collections import deque
from collections.abc import Iterable

from scheduler.llm.sequence import Sequence


class Trials:
    def __init__(self) -> None:
        self.current: Sequence | None = None
        self._held: deque[Sequence] = deque()

    def __bool__(self) -> bool:
        return self.current is not None or bool(self._held)

    def hold(self, sequence: Sequence) -> None:
        """Known from an earlier request: after all others."""
        sequence.held = True
        self._held.append(sequence)

    def hold_first(self, sequences: Iterable[Sequence]) -> None:
        """Before all others, in this order, and nobody is on trial."""
        self.current = None
        for sequence in reversed(list(sequences)):
            sequence.held = True
            self._held.appendleft(sequence)

    def next(self) -> Sequence | None:
        """Who is on trial, the next one where nobody is; passes over those that are done."""
        while self.current is None and self._held:
            sequence = self._held.popleft()
            if not sequence.done:
                self.current = sequence
        return self.current

    def end(self, sequence: Sequence) -> None:
        """It was cleared or is done; where it is held, `next` passes over it."""
        sequence.held = False
        if sequence is self.current:
            self.current = None
