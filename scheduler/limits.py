"""How large a step may be after one ran out of memory. Pure state: no clock, no requests."""


class MemoryLimit:
    """While it is active, steps run one at a time within it; each that goes well doubles it until it is none."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._most = (max_num_seqs, max_num_batched_tokens)
        self._limit: tuple[int, int] | None = None

    @property
    def active(self) -> bool:
        return self._limit is not None

    @property
    def num_seqs(self) -> int:
        return (self._limit or self._most)[0]

    @property
    def num_tokens(self) -> int:
        """A bound on cost; a single row may exceed it, for it cannot be made smaller."""
        return (self._limit or self._most)[1]

    def halve(self, num_seqs: int, num_tokens: int) -> None:
        """A step of this size did not fit."""
        self._limit = (max(1, min(num_seqs // 2, self.num_seqs)), max(1, min(num_tokens // 2, self.num_tokens)))

    def relax(self) -> None:
        """A step went well."""
        if self._limit is not None:
            doubled = (min(2 * self._limit[0], self._most[0]), min(2 * self._limit[1], self._most[1]))
            self._limit = None if doubled == self._most else doubled

    def lift(self) -> None:
        """The ranks are new ones."""
        self._limit = None
