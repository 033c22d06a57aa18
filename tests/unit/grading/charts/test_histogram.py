"""Every value is in one bar, and bars are few enough to be read."""

from hypothesis import given
from hypothesis import strategies as st

from grading.charts.drawing import MAX_BARS, Bar, histogram


def test_one_bar_for_each_number_of_points() -> None:
    bars = histogram([2, 0, 1.5, 2], 2, 0.5)

    assert bars == (Bar("0", 1), Bar("0.5", 0), Bar("1", 0), Bar("1.5", 1), Bar("2", 2))


def test_many_steps_share_a_bar_and_it_says_which() -> None:
    bars = histogram([0, 2, 3, 30, 29.5], 30, 1)

    assert [bar.label for bar in bars[:2]] == ["0–2", "3–5"]
    assert bars[-1] == Bar("30", 1)
    assert [bar.count for bar in bars] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_points_beside_the_steps_and_above_the_most_are_counted() -> None:
    assert [bar.count for bar in histogram([0.3, 1.9, 7], 2, 1)] == [1, 1, 1]


@given(
    st.lists(st.integers(0, 400)),
    st.integers(1, 200),
    st.sampled_from([0.01, 0.1, 0.25, 0.5, 1, 2.5, 3]),
    st.booleans(),
)
def test_nothing_is_lost(numbers: list[int], most_steps: int, step: float, binary: bool) -> None:
    values = [number * step if binary else round(number * step, 6) for number in numbers]

    bars = histogram(values, round(most_steps * step, 6), step)

    assert sum(bar.count for bar in bars) == len(values)
    assert 2 <= len(bars) <= MAX_BARS
    assert len({bar.label for bar in bars}) == len(bars)
