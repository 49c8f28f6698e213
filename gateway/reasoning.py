"""Splits what a model thinks from what it answers: `<think>…</think>` first, then the content. Knows text only.

How the text was cut into pieces never changes the result.
"""

from typing import Literal, NamedTuple

from gateway.held_text import HeldText, Leading
from gateway.stop_strings import Matcher, Search

OPEN = "<think>"
CLOSE = "</think>"
_CLOSE = Matcher([CLOSE])


class Split(NamedTuple):
    """What one piece of text brought to either side."""

    reasoning: str = ""
    content: str = ""


def opened_by(prompt: str) -> bool:
    """Whether a rendered prompt ends with an open think block, so that the model begins inside it."""
    return prompt.rstrip().endswith(OPEN)


class Reasoning:
    """One answer. Only a block at its very beginning is reasoning; tags that come later are content.

    White space around the tags belongs to neither side. An answer without a block is content as it is.
    """

    def __init__(self, *, opened: bool = False) -> None:
        """`opened`: the prompt has the opening tag already (`opened_by`)."""
        self._part: Literal["start", "reasoning", "content"] = "reasoning" if opened else "start"
        self._search = Search(_CLOSE)
        self._leading = Leading()  # start: what may become the opening tag
        self._space = HeldText()  # reasoning: white space that may be its end
        self._begun = False  # whether the present part has had anything but white space

    def feed(self, text: str) -> Split:
        reasoning = ""
        if self._part == "start":
            text = self._start(text)
        if self._part == "reasoning":
            found = self._search.feed(text)
            reasoning = self._trim(found.text)
            text = found.rest
            if found.hit is not None:
                self._part, self._begun = "content", False
                self._space.clear()
        if self._part == "content" and not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return Split(reasoning, text)

    def finish(self) -> Split:
        """What was held back, once nothing more comes."""
        if self._part == "start":
            return Split(content=self._leading.take())
        return Split(reasoning=self._trim(self._search.flush()) if self._part == "reasoning" else "")

    def _start(self, text: str) -> str:
        """The text behind the opening tag, or all of it where there is none; nothing while that is not known."""
        head = self._leading.add(text)
        if head.startswith(OPEN):
            self._part = "reasoning"
            self._leading.take()
            return head[len(OPEN) :]
        if OPEN.startswith(head):
            return ""
        self._part, self._begun = "content", True
        return self._leading.take()

    def _trim(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
        trimmed = text.rstrip()
        space = text[len(trimmed) :]
        if trimmed:
            self._begun = True
            trimmed = self._space.take() + trimmed
        self._space.add(space)
        return trimmed
