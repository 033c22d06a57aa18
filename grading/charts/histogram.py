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


def histogram(values: Iterable[Points], maximum: Points, step: Points) -> tuple[Bar, ...]:
    """Bars for 0 to `maximum` in steps of `step`, lowest first: one a step, or MAX_BARS at most with equally many.

    The last may have fewer steps. A value between two steps counts for the lower one, one above `maximum` for the
    last bar.
    """
    width, steps = Decimal(str(step)), int(Decimal(str(maximum)) / Decimal(str(step))) + 1
    steps_per_bar = -(-steps // MAX_BARS)
    bar_counts = Counter(min(int(Decimal(str(value)) / width), steps - 1) // steps_per_bar for value in values)
    return tuple(
        Bar(
            _label(first * width, min(first + steps_per_bar, steps) * width - width), bar_counts[first // steps_per_bar]
        )
        for first in range(0, steps, steps_per_bar)
    )


def _label(low: Decimal, high: Decimal) -> str:
    return f"{plain(low)}" if low == high else f"{plain(low)}–{plain(high)}"
