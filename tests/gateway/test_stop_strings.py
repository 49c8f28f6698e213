"""Stop strings against a search of the whole text, however the text is cut."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import Matcher, Search, StopStrings
from tests.gateway.pieces import cut, cuts

texts = st.text("ab\n€", max_size=40)
stop_lists = st.lists(st.text("ab\n€", min_size=1, max_size=5), min_size=1, max_size=6)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The hit that is complete first, the longest of those complete at once."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end - len(hit)], hit
    return text, None


def held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that a stop string begins with."""
    return max(n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops))


@given(texts, stop_lists, cuts)
def test_any_pieces_give_what_the_whole_text_gives(text: str, stops: list[str], at: list[int]) -> None:
    for include in (False, True):
        search = StopStrings(stops, include_stop=include)
        given_out = "".join(search.feed(piece)[0] for piece in cut(text, at)) + search.flush()
        before, hit = expected(text, stops)
        assert (given_out, search.hit) == (before + (hit or "" if include else ""), hit)


@given(texts, stop_lists)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    search = StopStrings(stops)
    out = ""
    for i, char in enumerate(text, 1):
        emitted, hit = search.feed(char)
        out += emitted
        if hit is not None:
            break
        assert out == text[: i - held(text[:i], stops)]


def test_nothing_comes_after_a_hit() -> None:
    search = StopStrings(["END"])
    assert search.feed("one E") == ("one ", None)
    assert search.feed("ND two") == ("", "END")
    assert search.feed("three") == ("", "END")
    assert search.flush() == ""


def test_a_search_goes_on_with_what_followed_the_hit() -> None:
    search = Search(Matcher(["<a>", "</a>"]))
    assert search.feed("x<a>y<") == ("x", "<a>", "y<")
    assert search.feed("y<") == ("y", None, "")
    assert search.feed("/a>z") == ("", "</a>", "z")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_many_stops_and_a_long_text_take_linear_time() -> None:
    """Stops that nearly match everywhere: a search for each at each place would take minutes."""
    stops = ["a" * n + "b" for n in range(1, 400)]
    search = StopStrings(stops)
    text = "a" * 200_000
    start = time.process_time()
    given_out = "".join(search.feed(text[i : i + 4])[0] for i in range(0, len(text), 4)) + search.flush()
    assert given_out == text
    assert time.process_time() - start < 5
