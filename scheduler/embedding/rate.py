"""How fast the ranks are: tokens per second of steps that left work waiting. Time is an argument.

Steps that emptied the queue say nothing of what full ones would do, so under light load the rate stays what it was.
"""

KEPT = 0.95  # of the past with each step: about the last twenty count
MIN_SECONDS = 0.5  # of busy time seen; before, the rate is unknown


class Rate:
    """Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._seen_s = 0.0
        self._since = float("-inf")  # since when the ranks have been on the oldest step

    def step_finished(self, num_tokens: int, launched_at: float, now: float, full: bool) -> None:
        """`full`: work was left waiting when the step was planned."""
        seconds = now - max(self._since, launched_at)
        self._since = now
        if full:
            self._tokens = self._tokens * KEPT + num_tokens
            self._seconds = self._seconds * KEPT + seconds
            self._seen_s += seconds

    def seconds_for(self, num_tokens: int) -> float:
        """How long so many tokens take; 0 while that is unknown."""
        return num_tokens * self._seconds / self._tokens if self._seen_s >= MIN_SECONDS else 0.0
