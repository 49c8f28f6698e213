"""White space that is held back, as long as a generation may be: every character of it is handled a few times."""

from collections.abc import Callable
from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generate_answer import Answer, AnswerForm
from gateway.held_text import HeldText, Leading
from gateway.reasoning import Reasoning
from gateway.tasks import Piece
from gateway.tool_calls import HERMES, LLAMA, ArgumentsDelta, CallStart, Content, ToolCallParser, ToolFormat
from tests.gateway.pieces import cut, cuts

NUM_PIECES = 3000


class Counted(str):
    """Text whose copies are counted, in characters."""

    __slots__ = ()
    num_copied = 0

    @staticmethod
    def of(text: str) -> "Counted":
        Counted.num_copied += len(text)
        return Counted(text)

    def __add__(self, other: str) -> "Counted":
        return Counted.of(str.__add__(self, other))

    def __radd__(self, other: str) -> "Counted":
        return Counted.of(str.__add__(other, self))

    def __getitem__(self, key: SupportsIndex | slice) -> "Counted":
        return Counted.of(str.__getitem__(self, key))

    def lstrip(self, chars: str | None = None) -> "Counted":
        return Counted.of(str.lstrip(self, chars))

    def rstrip(self, chars: str | None = None) -> "Counted":
        return Counted.of(str.rstrip(self, chars))


@pytest.fixture
def num_copied(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many characters have been copied since."""
    take = HeldText.take
    monkeypatch.setattr(HeldText, "take", lambda held: Counted.of(take(held)))
    Counted.num_copied = 0
    return lambda: Counted.num_copied


CALL = '{"name": "f", "arguments": {}}'


@pytest.mark.parametrize("end", ["", "x", "{", "<", "</think>"])
@pytest.mark.parametrize("begin", ["", "<think>", "<think>a"])
def test_thinking(begin: str, end: str, num_copied: Callable[[], int]) -> None:
    reasoning = Reasoning()
    reasoning.feed(begin)
    found = [reasoning.feed(Counted(" ")) for _ in range(NUM_PIECES)] + [reasoning.feed(end), reasoning.finish()]
    assert sum(len(each.reasoning) + len(each.content) for each in found) <= NUM_PIECES + len(end)
    assert num_copied() < 10 * NUM_PIECES


@pytest.mark.parametrize("end", ["", "x", "{", "<", "]"])
@pytest.mark.parametrize(
    ("form", "begin"),
    [(HERMES, begin) for begin in ("", "a", "<tool_call>", "<tool_call>[", "<tool_call>" + CALL, "<tool_call>[" + CALL)]
    + [(LLAMA, begin) for begin in ("", "a", "<|python_tag|>", CALL, CALL + ";<|python_tag|>")],
)
def test_tool_calls(form: ToolFormat, begin: str, end: str, num_copied: Callable[[], int]) -> None:
    parser = ToolCallParser(form)
    parser.feed(begin)
    events = [event for _ in range(NUM_PIECES) for event in parser.feed(Counted(" "))]
    events += parser.feed(end) + parser.finish()
    texts = [event.text for event in events if isinstance(event, Content | ArgumentsDelta)]
    assert not any(isinstance(event, CallStart) for event in events)
    assert sum(map(len, texts)) <= NUM_PIECES + len(begin) + len(end)
    assert num_copied() < 10 * NUM_PIECES


def test_an_answer_of_white_space_alone(num_copied: Callable[[], int]) -> None:
    answer, piece = Answer(AnswerForm(thinking="maybe", tools=HERMES)), Piece(0)
    for _ in range(NUM_PIECES):
        answer.add(piece, Counted(" "))
    answer.finish(piece)
    assert piece.text == " " * NUM_PIECES
    assert num_copied() < 10 * NUM_PIECES


@given(st.text(" \n\u3000ab;", max_size=40), cuts)
def test_a_beginning_is_the_same_in_any_pieces(text: str, at: list[int]) -> None:
    leading = Leading()
    for piece in cut(text, at):
        leading.add(piece)
    assert leading.head == text.lstrip()
    assert leading.take() == text
    assert leading.take() == leading.head == ""


def test_what_is_passed_over_stands_before() -> None:
    leading = Leading()
    leading.add(" ab")
    assert leading.pass_over(2) == ""
    assert leading.add(" c") == "c"
    assert leading.take_head() == "c"
    assert leading.take() == " ab "
