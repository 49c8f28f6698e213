"""Text that is held back until it is known what it is. Knows no more of it than the pieces in which it came.

Adding a piece copies nothing of what is there: white space of any length costs what it is long, once.
"""

import re

SPACE = re.compile(r"\s*")


class HeldText:
    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def take(self) -> str:
        """All of it; nothing is held then."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def clear(self) -> None:
        self._pieces.clear()


class Leading:
    """The beginning of a text: white space of any length, and a `head` that its reader looks at after every piece, and
    takes, or takes for nothing, as soon as it is long enough to tell."""

    def __init__(self, space: re.Pattern[str] = SPACE) -> None:
        """`space` matches what may stand before the head, be it nothing."""
        self.head = ""
        self._space = space
        self._before = HeldText()

    def add(self, text: str) -> str:
        """The head, with `text` behind it."""
        if not self.head:
            match = self._space.match(text)
            assert match is not None, "white space may be none"
            self._before.add(match[0])
            text = text[match.end() :]
        self.head += text
        return self.head

    def pass_over(self, num_chars: int) -> str:
        """Counts that much of the head, and white space behind it, as standing before; the head that is left."""
        passed, left = self.head[:num_chars], self.head[num_chars:]
        self._before.add(passed)
        self.head, self._space = "", SPACE
        return self.add(left)

    def take_head(self) -> str:
        head, self.head = self.head, ""
        return head

    def take(self) -> str:
        """What stands before, and the head; nothing is held then."""
        return self._before.take() + self.take_head()
