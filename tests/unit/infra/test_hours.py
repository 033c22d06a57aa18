"""The hours in which a worker takes jobs."""

from datetime import datetime

import pytest

from infra.config.hours import Hours
from messages.errors import InvalidMessage


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("", ("00:00", "12:00", "23:59"), ()),
        ("8:00-18:30", ("08:00", "18:29"), ("07:59", "18:30", "00:00")),
        ("18:00-08:00", ("18:00", "23:59", "00:00", "07:59"), ("08:00", "17:59")),
        ("12:00-13:00, 20:00-24:00", ("12:30", "23:59"), ("13:00", "00:00")),
    ],
)
def test_hours_begin_with_their_first_minute_and_end_before_their_last(
    text: str, inside: tuple[str, ...], outside: tuple[str, ...]
) -> None:
    hours = Hours.parse("hours", text)
    assert [hours.include(datetime.strptime(moment, "%H:%M")) for moment in inside] == [True] * len(inside)
    assert [hours.include(datetime.strptime(moment, "%H:%M")) for moment in outside] == [False] * len(outside)


@pytest.mark.parametrize("text", ["8-18", "25:00-26:00", "08:00-08:00", "08:00", "08:00-24:30", "night"])
def test_what_are_no_hours_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidMessage, match="such as 18:00-08:00"):
        Hours.parse("hours", text)
