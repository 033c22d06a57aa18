"""How often each number of points was given, in bars that a page can draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from grading.rubric.rubric import Points, plain

MAX_BARS = 12  # more can't be read on a phone


@dataclass(frozen=True, slots=True)
class Bar:
    """`count` times it was one of the points that `label` names: `7`, or `6–8` with both ends."""

    label: str
    count: int


def histogram(values: Iterable[Points], most: Points, step: Points) -> tuple[Bar, ...]:
    """Bars for 0 to `most` in steps of `step`, lowest first: one a step, or at most MAX_BARS with equally many steps.

    The last may have fewer steps. A value between two steps counts for the lower one, one above `most` for the last
    bar.
    """
    width, steps = Decimal(str(step)), int(Decimal(str(most)) / Decimal(str(step))) + 1
    together = -(-steps // MAX_BARS)
    given = Counter(min(int(Decimal(str(value)) / width), steps - 1) // together for value in values)
    return tuple(
        Bar(_label(first * width, min(first + together, steps) * width - width), given[first // together])
        for first in range(0, steps, together)
    )


def _label(low: Decimal, high: Decimal) -> str:
    return f"{plain(low)}" if low == high else f"{plain(low)}–{plain(high)}"
