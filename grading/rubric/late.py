"""The deduction for late work: `late:` in a rubric.

    late:
      due: 2026-11-03T23:59:00+01:00
      percent: 10            # of the points possible, for each day begun after the due time
      grace_minutes: 15      # optional, 0: work within it is on time; later work counts from the due time
      most_percent: 50       # optional, 100

The rule is not in any prompt and not in the rubric's digest, so a changed due time does not cause new jobs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from messages.errors import RubricError

KEYS = ("due", "percent", "grace_minutes", "most_percent")
_CENT = Decimal("0.01")


@dataclass(frozen=True, slots=True)
class LateRule:
    """The deduction for late work, as described at the top of this file. `due` is in ISO 8601."""

    due: str
    percent: int | float
    grace_minutes: int | float = 0
    most_percent: int | float = 100

    def days(self, submitted_at: datetime) -> int:
        """Return the number of days begun after the due time, 0 within the grace.

        Raises TypeError if only one of the two times has an offset.
        """
        late = submitted_at - datetime.fromisoformat(self.due)
        return 0 if late <= timedelta(minutes=self.grace_minutes) else math.ceil(late / timedelta(days=1))

    def deduction(self, days: int, possible: int | float) -> tuple[Decimal, Decimal]:
        """Return what this many days cost, as (percent, points with two decimals)."""
        percent = min(Decimal(str(self.percent)) * days, Decimal(str(self.most_percent)))
        return percent, (Decimal(str(possible)) * percent / 100).quantize(_CENT, ROUND_HALF_UP)


def parse_late(file: str, fields: Mapping[str, Any]) -> LateRule:
    """Parse the late rule of a rubric. Raises RubricError."""
    text = str(fields["due"])
    try:
        due = datetime.fromisoformat(text)
    except ValueError:
        due = None
    if due is None or len(text) < len("2026-11-03T23:59"):
        raise RubricError(f"{file}: late: 'due' must be a date and a time, as in 2026-11-03T23:59:00+01:00")
    numbers = {"grace_minutes": 0, "most_percent": 100} | {key: fields[key] for key in KEYS[1:] if key in fields}
    for key, maximum in (("percent", 100), ("grace_minutes", 10_080), ("most_percent", 100)):
        value = numbers[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
            raise RubricError(f"{file}: late: '{key}' must be a number from 0 to {maximum:,}")
    return LateRule(due.isoformat(), **numbers)
