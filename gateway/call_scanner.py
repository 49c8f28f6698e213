"""Reads one tool call, `{"name": "f", "arguments": {…}}`, character by character. Knows its JSON and no more.

It gives out the name and then the arguments' own text as early as it can be nothing else, and checks only what that
takes: keys, strings and brackets. Whether the arguments are valid JSON is for their reader to find out.
"""

import json
from typing import Literal, NamedTuple

NAME_KEYS = ("name",)
ARGUMENTS_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id", "function", "index")  # which models repeat from what they saw; an answer has others
_SPACE = " \t\r\n"
_DELIMITERS = ",}]" + _SPACE


class Scanned(NamedTuple):
    """What one piece brought. `name` comes once, with the piece that makes sure this is a call; `rest` is what
    follows the call's end, or what could not be read."""

    name: str | None
    arguments: str
    rest: str


class _Value:
    """Finds the end of one JSON value."""

    def __init__(self, first: str) -> None:
        self.scalar = first not in '"{['
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def ends_with(self, char: str) -> bool:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return not (self.scalar or self._in_string or self._depth)


class CallScanner:
    """One call. `state` says whether more is wanted, it is complete, or it is none (or broke off)."""

    def __init__(self, *, needs_arguments: bool) -> None:
        """`needs_arguments`: an object with a name alone is no call."""
        self.state: Literal["open", "done", "failed"] = "open"
        self.sure = False
        self._needs_arguments = needs_arguments
        self._expects: Literal["object", "key", "colon", "value", "comma"] = "object"
        self._value: _Value | None = None
        self._text: list[str] = []  # of the value being read
        self._key: str | None = None  # of the value that comes; None while a key is read
        self._name: str | None = None
        self._arguments: list[str] | None = None  # not yet given out
        self._streams = False  # the value being read is the arguments' object
        self._raw: list[str] = []

    @property
    def raw(self) -> str:
        """All text taken while this was not sure to be a call."""
        return "".join(self._raw)

    def feed(self, text: str) -> Scanned:
        at, name = 0, None
        for char in text:
            self._step(char)
            at += self.state != "failed"
            if self.state != "open":
                break
            if not self.sure and self._is_call():
                self.sure, name = True, self._name
        if self.state == "done" and not self.sure:
            self.sure, name = True, self._name
        if not self.sure:
            self._raw.append(text[:at])
        arguments = ""
        if self.sure and self._arguments:
            arguments = "".join(self._arguments)
            self._arguments.clear()
        return Scanned(name, arguments, text[at:])

    def _is_call(self) -> bool:
        return self._name is not None and self._arguments is not None

    def _step(self, char: str) -> None:
        if self._value is not None:
            if not (self._value.scalar and char in _DELIMITERS):
                self._take(char)
                return
            self._end_value()
        if char in _SPACE:
            return
        match self._expects, char:
            case "object", "{":
                self._expects = "key"
            case "key", '"':
                self._key = None
                self._begin_value(char)
            case "colon", ":":
                self._expects = "value"
            case "value", _ if char not in ",:}]":
                self._begin_value(char)
            case "comma", ",":
                self._expects = "key"
            case (("key" | "comma"), "}"):
                self._end()
            case _:
                self.state = "failed"

    def _begin_value(self, char: str) -> None:
        if self._key in ARGUMENTS_KEYS and self._arguments is None:
            if char not in '{"n':  # an object, its JSON as a string, or null
                self.state = "failed"
                return
            if char == "{":
                self._streams, self._arguments = True, []
        self._value, self._text = _Value(char), []
        self._take(char)

    def _take(self, char: str) -> None:
        assert self._value is not None, "a value is being read"
        (self._arguments if self._streams and self._arguments is not None else self._text).append(char)
        if self._value.ends_with(char):
            self._end_value()

    def _end_value(self) -> None:
        key, text = self._key, "".join(self._text)
        self._value = None
        if self._streams:
            self._streams, self._expects = False, "comma"
            return
        try:
            value = json.loads(text, strict=False) if key in (None, *NAME_KEYS, *ARGUMENTS_KEYS) else None
        except ValueError:
            self.state = "failed"
            return
        if key is None:
            self._key, self._expects = value, "colon"
            if value not in (*NAME_KEYS, *ARGUMENTS_KEYS, *OTHER_KEYS):
                self.state = "failed"
            return
        self._expects = "comma"
        if key in NAME_KEYS and self._name is None:
            self._name = value if isinstance(value, str) else None
            self.state = "open" if self._name else "failed"
        elif key in ARGUMENTS_KEYS and self._arguments is None:
            self._arguments = ["{}" if value is None else str(value)]

    def _end(self) -> None:
        if self._arguments is None and not self._needs_arguments:
            self._arguments = ["{}"]
        self.state = "done" if self._is_call() else "failed"
