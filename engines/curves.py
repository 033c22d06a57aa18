"""Measures a worker's rates as it runs, by the number of parallel sequences or by the prompt's length."""

import threading
from collections import defaultdict

from messages.workers import MAX_POINTS, RateCurve

_WEIGHT = 0.1  # weight of the newest value in a moving average; the first ten values have equal weights


class MeasuredCurves:
    """Moving averages of tokens a second, by model and by a number. Thread-safe.

    The number is how many sequences were decoded in parallel, or a prompt's length from `length_class`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # For each model and number, how many rates were measured, and their moving average.
        self._points: dict[str, dict[int, tuple[int, float]]] = defaultdict(dict)

    def note(self, model: str, at: int, tokens_per_s: float) -> None:
        """Add a measurement."""
        with self._lock:
            points = self._points[model]
            times, mean = points.get(at, (0, 0.0))
            points[at] = times + 1, mean + max(_WEIGHT, 1 / (times + 1)) * (tokens_per_s - mean)

    def curves(self) -> tuple[RateCurve, ...]:
        """The points for a registration: the most frequent numbers, ascending."""
        with self._lock:
            by_model = {model: dict(points) for model, points in self._points.items()}
        curves = []
        for model, points in by_model.items():
            often = sorted(sorted(points, key=lambda at: -points[at][0])[:MAX_POINTS])
            curves.append(RateCurve(model, tuple(map(float, often)), tuple(points[at][1] for at in often)))
        return tuple(curves)


def length_class(tokens: int) -> int:
    """A prompt's length as curves use it: rounded up to a power of two."""
    return 1 << max(0, tokens - 1).bit_length()
