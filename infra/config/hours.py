"""The hours in which a worker takes jobs, by its machine's clock: `18:00-08:00`, or `12:00-13:30, 18:00-08:00`."""

import re
from dataclasses import dataclass
from datetime import datetime, time

from messages.errors import InvalidMessage

_SPAN = re.compile(r"\s*(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)\s*\Z")


@dataclass(frozen=True, slots=True)
class Hours:
    """Spans of a day.

    Each includes its first minute and excludes its last; if it ends before it begins, it spans midnight.
    """

    spans: tuple[tuple[time, time], ...] = ()

    @classmethod
    def parse(cls, name: str, text: str) -> "Hours":
        """Read the text of a setting. "" means always. Raises InvalidMessage that says what is expected."""
        return cls(tuple(_span(name, part) for part in text.split(",")) if text.strip() else ())

    def include(self, moment: datetime) -> bool:
        """Whether jobs may be taken at this moment."""
        now = moment.time()
        return not self.spans or any(
            start <= now < end if start < end else now >= start or now < end for start, end in self.spans
        )


ALL_HOURS = Hours()


def _span(name: str, text: str) -> tuple[time, time]:
    match = _SPAN.match(text)
    try:
        if match is None:
            raise ValueError
        hour, minute, last_hour, last_minute = map(int, match.groups())
        start, end = time(hour, minute), time(last_hour % 24, last_minute)
        if last_hour > 24 or (last_hour == 24 and last_minute) or start == end:
            raise ValueError
    except ValueError:
        raise InvalidMessage(f"{name} must be hours such as 18:00-08:00, not {text.strip()!r:.40}") from None
    return start, end
