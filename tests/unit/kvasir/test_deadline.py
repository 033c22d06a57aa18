"""`--deadline`: times to go and times of day, and what they do to a batch."""

from datetime import datetime

import pytest

from kvasir.deadline import seconds_to

EVENING = datetime(2026, 11, 20, 18, 30)


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("8h", 8),
        ("90m", 1.5),
        ("1h30m", 1.5),
        (" 2d ", 48),
        ("1d12h", 36),
        ("3600s", 1),
        ("19:00", 0.5),
        ("07:30", 13),
        ("7:30", 13),
        ("18:30", 24),
    ],
)
def test_a_deadline_is_a_time_to_go_or_the_next_such_time_of_day(text: str, hours: float) -> None:
    assert seconds_to(text, EVENING) == hours * 3600


@pytest.mark.parametrize("text", ["", "soon", "8", "0h", "-1h", "8 hours", "h", "24:00", "12:60", "30m1h"])
def test_what_is_no_deadline_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 07:30"):
        seconds_to(text, EVENING)
