"""Thinking and answer come apart the same however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.reasoning import Reasoning, opened_by
from tests.gateway.pieces import cut, cuts

parts = st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", " ", "\n", "a", "é!", "nk>"]), max_size=12)


def split(pieces: list[str], *, opened: bool = False) -> tuple[str, str]:
    reasoning = Reasoning(opened=opened)
    found = [*map(reasoning.feed, pieces), reasoning.finish()]
    return "".join(each.reasoning for each in found), "".join(each.content for each in found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nOne, two.\n</think>\n\nThree.\n", ("One, two.", "Three.\n")),
        ("\n <think>a  b</think>c", ("a  b", "c")),
        ("<think>\n\n</think>\n\nyes", ("", "yes")),
        ("no thoughts at all ", ("", "no thoughts at all ")),
        (" \n", ("", " \n")),
        ("", ("", "")),
        ("a <think>b</think>", ("", "a <think>b</think>")),  # not at the beginning
        ("<think>a</think>b <think>c</think>", ("a", "b <think>c</think>")),
        ("<think>cut off </thi", ("cut off </thi", "")),
        ("<think>cut off \n", ("cut off", "")),
        ("<thin", ("", "<thin")),
        ("<thinking>a", ("", "<thinking>a")),
    ],
)
def test_split(text: str, expected: tuple[str, str]) -> None:
    assert split([text]) == expected
    assert split(list(text)) == expected


def test_a_prompt_may_have_begun_the_thinking() -> None:
    assert opened_by("<|im_start|>assistant\n<think>\n")
    assert not opened_by("<|im_start|>assistant\n")
    assert not opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert split(["One.\n</think>\nTwo."], opened=True) == ("One.", "Two.")
    assert split(["never ends"], opened=True) == ("never ends", "")


@given(parts.map("".join), cuts, st.booleans())
def test_any_pieces_give_what_the_whole_text_gives(text: str, at: list[int], opened: bool) -> None:
    assert split(cut(text, at), opened=opened) == split([text], opened=opened)


@given(parts.map("".join))
def test_nothing_but_tags_and_white_space_is_lost(text: str) -> None:
    reasoning, content = split([text])
    bare = "".join((reasoning + content).split())
    whole = "".join(text.split())
    if bare != whole:
        assert whole.startswith("<think>")
        assert bare in (whole.removeprefix("<think>"), whole.removeprefix("<think>").replace("</think>", "", 1))


def test_what_is_sure_is_not_held_back() -> None:
    reasoning = Reasoning()
    assert reasoning.feed("<think>a ") == ("a", "")
    assert reasoning.feed("b<") == (" b", "")
    assert reasoning.feed("/think>c ") == ("", "c ")
    assert reasoning.feed("<") == ("", "<")
