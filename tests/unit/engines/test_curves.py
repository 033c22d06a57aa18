"""What a worker measures of its own rates."""

import pytest

from engines.curves import MeasuredCurves, length_class
from messages.workers import MAX_POINTS


def test_a_curve_is_the_mean_by_number_and_forgets_slowly() -> None:
    curves = MeasuredCurves()
    for sequences, rate in ((4, 80.0), (1, 50.0), (4, 100.0)):
        curves.note("m", sequences, rate)

    (curve,) = curves.curves()
    assert (curve.model, curve.at, curve.tokens_per_s) == ("m", (1.0, 4.0), (50.0, 90.0))
    assert curve.rate(2.5) == pytest.approx(70.0)

    for _ in range(100):
        curves.note("m", 4, 200.0)
    assert curves.curves()[0].tokens_per_s[1] == pytest.approx(200.0, rel=0.01)


def test_of_more_numbers_than_a_curve_has_points_the_most_frequent_stay() -> None:
    curves = MeasuredCurves()
    for sequences in range(1, MAX_POINTS + 10):
        for _ in range(1 + (sequences > 9)):
            curves.note("m", sequences, 1.0)

    assert curves.curves()[0].at == tuple(map(float, range(10, MAX_POINTS + 10)))


def test_lengths_are_told_apart_by_powers_of_two() -> None:
    assert [length_class(tokens) for tokens in (1, 2, 3, 1024, 1025)] == [1, 2, 4, 1024, 2048]
