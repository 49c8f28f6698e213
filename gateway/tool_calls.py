"""Tool calls in a model's output: which format its template teaches, and a parser that follows the text as it comes.

    feed(text) ─► Content("Let me see.") · CallStart(0, id, "weather") · ArgumentsDelta(0, '{"city": ') · …

Knows text only. How the text was cut into pieces never changes the result. What turns out to be no call is content;
arguments are passed on as the model wrote them, valid JSON or not, as OpenAI's are.
"""

import re
import secrets
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from gateway.call_scanner import CallScanner, Scanned
from gateway.held_text import HeldText, Leading
from gateway.stop_strings import Matcher, Search


class ToolFormat(Struct, frozen=True):
    """How a model writes a call: `{open}{"name": …, "{arguments}": …}{close}`, several with `between` between."""

    name: str
    arguments: str
    open: str = ""
    close: str = ""
    between: str = ""


HERMES = ToolFormat("hermes", "arguments", "<tool_call>\n", "\n</tool_call>", "\n")  # Hermes 2 Pro, Qwen2.5, Qwen3
LLAMA = ToolFormat("llama", "parameters", between="; ")  # Llama 3.x, whose answer is nothing but its calls


class Content(Struct, frozen=True):
    text: str


class CallStart(Struct, frozen=True):
    index: int
    id: str
    name: str


class ArgumentsDelta(Struct, frozen=True):
    index: int
    text: str


Event = Content | CallStart | ArgumentsDelta


_OTHERS = ("<function=", "<arg_key>")  # what Qwen3-Coder and GLM put between the same tags


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template's source teaches, None for none that is known here."""
    if "<tool_call>" in template and not any(tag in template for tag in _OTHERS):
        return HERMES
    if '"parameters"' in template and ("python_tag" in template or "ipython" in template):
        return LLAMA
    return None


class ToolCallParser:
    """One answer's text in, events out."""

    def __init__(self, form: ToolFormat, *, new_id: Callable[[], str] | None = None) -> None:
        self._out = _Events(new_id or _new_id)
        self._framing = _Tagged(self._out) if form.open else _Bare(self._out)

    @property
    def num_calls(self) -> int:
        return self._out.num_calls

    def feed(self, text: str) -> list[Event]:
        while text:
            text = self._framing.advance(text)
        return self._out.take()

    def finish(self) -> list[Event]:
        """What was held back, once nothing more comes. A call that has begun stays one, however it broke off."""
        self._framing.finish()
        self._out.end()
        return self._out.take()


class _Events:
    """What is to be given out: neighbours joined, white space around calls left out."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._events: list[Event] = []
        self._space = HeldText()  # belongs to the content only if more content follows

    def content(self, text: str) -> None:
        trimmed = text.rstrip()
        if trimmed:
            self._events.append(Content(self._space.take() + trimmed))
        self._space.add(text[len(trimmed) :])

    def call(self, scanned: Scanned) -> None:
        if scanned.name is not None:
            self._space.clear()
            self._events.append(CallStart(self.num_calls, self._new_id(), scanned.name))
            self.num_calls += 1
        if scanned.arguments:
            self._events.append(ArgumentsDelta(self.num_calls - 1, scanned.arguments))

    def end(self) -> None:
        if self._space and not self.num_calls:
            self._events.append(Content(self._space.take()))
        self._space.clear()

    def take(self) -> list[Event]:
        taken: list[Event] = []
        for event in self._events:
            last = taken[-1] if taken else None
            if isinstance(event, Content) and isinstance(last, Content):
                taken[-1] = Content(last.text + event.text)
            elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == event.index:
                taken[-1] = ArgumentsDelta(event.index, last.text + event.text)
            else:
                taken.append(event)
        self._events = []
        return taken


_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_OPENING = Matcher([_TAG])


class _Tagged:
    """`<tool_call>{…}</tool_call>` anywhere in the answer; a list of calls within one pair of tags is taken, too."""

    def __init__(self, out: "_Events") -> None:
        self._out = out
        self._state: Literal["content", "open", "call", "after"] = "content"
        self._search = Search(_OPENING)
        self._scanner = CallScanner(needs_arguments=False)
        self._held = HeldText()  # open, call: since the tag, or since the last call
        self._leading = Leading()  # after
        self._in_list = False

    def advance(self, text: str) -> str:
        """Takes some of `text`, at least one character, or all but keeps in mind; gives the rest."""
        match self._state:
            case "content":
                return self._content(text)
            case "open":
                return self._open(text)
            case "call":
                return self._call(text)
            case "after":
                return self._after(text)

    def finish(self) -> None:
        if self._state == "content":
            self._out.content(self._search.flush())
        elif self._state == "open" or (self._state == "call" and not self._scanner.sure):
            self._out.content(self._held.take() + self._scanner.raw)

    def _content(self, text: str) -> str:
        found = self._search.feed(text)
        self._out.content(found.text)
        if found.hit is not None:
            self._in_list = False
            self._begin(found.hit)
        return found.rest

    def _begin(self, held: str) -> None:
        """A call may come now; `held` is content if none does."""
        self._state = "open"
        self._held.clear()
        self._held.add(held)
        self._scanner = CallScanner(needs_arguments=False)

    def _open(self, text: str) -> str:
        rest = text.lstrip()
        self._held.add(text[: len(text) - len(rest)])
        if rest.startswith("{"):
            self._state = "call"
            return rest
        if rest.startswith("[") and not self._in_list:
            self._in_list = True
            self._held.add("[")
            return rest[1:]
        if rest:
            self._give_up(self._held.take())
        return rest

    def _call(self, text: str) -> str:
        scanned = self._scanner.feed(text)
        self._out.call(scanned)
        if self._scanner.state == "failed":
            self._give_up("" if self._scanner.sure else self._held.take() + self._scanner.raw)
        elif self._scanner.state == "done":
            self._state, self._leading = "after", Leading()
        return scanned.rest

    def _after(self, text: str) -> str:
        head = self._leading.add(text)
        if self._in_list and head[:1] in (",", "]"):
            self._leading = Leading()
            self._in_list = head[0] == ","
            if self._in_list:
                self._begin(",")
            return head[1:]
        if head.startswith(_END_TAG):
            self._state = "content"
            return head[len(_END_TAG) :]
        if _END_TAG.startswith(head):
            return ""
        self._state = "content"  # the end tag is missing: what follows is content
        return self._leading.take()

    def _give_up(self, content: str) -> None:
        self._out.content(content)
        self._state = "content"


_PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[\s;,]*")


class _Bare:
    """`{…}; {…}` from the answer's first character on, with or without `<|python_tag|>`; otherwise it is content."""

    def __init__(self, out: "_Events") -> None:
        self._out = out
        self._state: Literal["start", "call", "after", "content"] = "start"
        self._scanner = CallScanner(needs_arguments=True)
        self._leading = Leading()
        self._tagged = False

    def advance(self, text: str) -> str:
        if self._state == "content":
            self._out.content(text)
            return ""
        if self._state == "call":
            return self._call(text)
        head = self._leading.add(text)
        if not self._tagged and head.startswith(_PYTHON_TAG):
            self._tagged = True
            head = self._leading.pass_over(len(_PYTHON_TAG))
        if head.startswith("{"):
            self._state = "call"
            self._scanner = CallScanner(needs_arguments=True)
            return self._leading.take_head()
        if not _PYTHON_TAG.startswith(head):
            self._state = "content"
            self._out.content(self._leading.take())
        return ""

    def finish(self) -> None:
        if self._state == "start" or (self._state == "call" and not self._scanner.sure):
            self._out.content(self._leading.take() + self._scanner.raw)

    def _call(self, text: str) -> str:
        scanned = self._scanner.feed(text)
        self._out.call(scanned)
        if self._scanner.state == "failed":
            self._out.content("" if self._scanner.sure else self._leading.take() + self._scanner.raw)
            self._state = "content"
        elif self._scanner.state == "done":
            self._state, self._leading, self._tagged = "after", Leading(_SEPARATORS), False
        return scanned.rest


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
