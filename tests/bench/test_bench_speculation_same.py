"""Where tokens first differ, and whether that was a tie."""

import math

from bench.micro.speculation_same import Said, differences


def test_the_margin_of_the_first_difference() -> None:
    expected = [Said([1, 2, 3], [0.5, 0.25, 4.0]), Said([7, 8], [1.0, 2.0]), Said([5], [math.inf])]
    found = [Said([1, 9, 9], []), Said([7, 8], []), Said([6], [])]
    assert differences(expected, found) == [0.25, math.inf]
