"""Gaps between replays are found in a profile's spans."""

from bench.micro.decode_gaps import Span, gaps


def test_gaps_are_between_kernels_around_copies() -> None:
    first = [Span(0, 10, False), Span(12, 30, False)]  # idle inside a replay is not a gap
    copies = [Span(31, 32, True), Span(35, 36, True)]
    second = [Span(40, 50, False), Span(51, 60, False)]
    more = [Span(58, 59, True), Span(61, 70, False)]  # a copy beside a kernel
    assert gaps(first + copies + second + more) == [10, 1]


def test_a_step_alone_has_none() -> None:
    assert gaps([Span(0, 1, True), Span(2, 3, False), Span(4, 5, True)]) == []
