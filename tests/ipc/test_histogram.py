"""The one histogram of all processes."""

from ipc.histogram import Histogram


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram((1.0, 10.0))
    for value in (0.5, 1.0, 5.0, 50.0):
        histogram.observe(value)
    assert histogram.samples("x", 'a="b"') == {
        'x_bucket{a="b",le="1.0"}': 2.0,
        'x_bucket{a="b",le="10.0"}': 3.0,
        'x_bucket{a="b",le="+Inf"}': 4.0,
        'x_sum{a="b"}': 56.5,
        'x_count{a="b"}': 4.0,
    }


def test_without_labels_there_are_no_empty_braces() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    assert histogram.samples("x") == {
        'x_bucket{le="1.0"}': 1.0,
        'x_bucket{le="+Inf"}': 1.0,
        "x_sum": 0.5,
        "x_count": 1.0,
    }
