"""Finds given strings in a text that comes in pieces, and holds back no more than could still become one of them.

Knows characters only: no tokens, no requests. How the text was cut into pieces never changes the result.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """What one piece brought: text that is free to go, the string that was hit, and what followed it."""

    text: str
    hit: str | None = None
    rest: str = ""


class Matcher:
    """The states of one set of strings, shared by every text that is searched for them.

    An Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", CACM 1975): one step a character
    however many strings there are. State i stands for a prefix of a string: the longest one that the text read so
    far ends with. So its length is just what must be held back.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Raises ValueError for an empty string, which would be found everywhere."""
        if not all(strings):
            raise ValueError("an empty string cannot be searched for")
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._hit: list[str | None] = [None]  # the longest of the strings that ends in a state
        self.length = [0]
        for string in strings:
            self._add(string)
        self._link()

    def step(self, state: int, char: str) -> int:
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if not state:
                return 0
            state = self._fail[state]

    def hit(self, state: int) -> str | None:
        return self._hit[state]

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._next[state].get(char)
            if following is None:
                following = self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._hit.append(None)
                self.length.append(self.length[state] + 1)
            state = following
        self._hit[state] = string

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], char)
                queue.append(following)
            if self._hit[state] is None:
                self._hit[state] = self._hit[self._fail[state]]


class Search:
    """One text. The first string to be complete is the hit; of those complete at once, the longest."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> Found:
        """After a hit the search begins anew: feed it `rest` to go on."""
        state, step, hit_of = self._state, self._matcher.step, self._matcher.hit
        for at, char in enumerate(text, 1):
            state = step(state, char)
            hit = hit_of(state) if state else None
            if hit is not None:
                before = (self._held + text[:at])[: -len(hit)]
                self._state, self._held = 0, ""
                return Found(before, hit, text[at:])
        self._state = state
        self._held += text
        free = len(self._held) - self._matcher.length[state]
        text, self._held = self._held[:free], self._held[free:]
        return Found(text)

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        text, self._held, self._state = self._held, "", 0
        return text


class StopStrings:
    """A generation's `stop`: text goes through until one of them is complete, and nothing after that."""

    def __init__(self, stops: Matcher | Sequence[str], *, include_stop: bool = False) -> None:
        """Several generations may share a Matcher. `include_stop` leaves the stop string in the text (vLLM's
        `include_stop_str_in_output`)."""
        self._search = Search(stops if isinstance(stops, Matcher) else Matcher(stops))
        self._include = include_stop
        self.hit: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text to emit now, and the stop string that was hit."""
        if self.hit is not None:
            return "", self.hit
        found = self._search.feed(text)
        self.hit = found.hit
        if found.hit is not None and self._include:
            return found.text + found.hit, found.hit
        return found.text, found.hit

    def flush(self) -> str:
        """The text held back, when the generation ends without another hit."""
        return self._search.flush()
