"""Which replica gets the next chunk."""

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A replica as seen by the choice: tokens this gateway has there, and tokens it said it had in all."""

    @property
    def outstanding_tokens(self) -> int: ...

    @property
    def reported_tokens(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def least_outstanding(candidates: Iterable[C], turn: int) -> C | None:
    """The one with the fewest outstanding tokens; among equals the one that reports fewest; then by `turn`."""
    best: list[C] = []
    least: tuple[int, int] | None = None
    for candidate in candidates:
        load = (candidate.outstanding_tokens, candidate.reported_tokens)
        if least is None or load < least:
            best, least = [candidate], load
        elif load == least:
            best.append(candidate)
    return best[turn % len(best)] if best else None
