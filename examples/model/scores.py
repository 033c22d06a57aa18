"""How good a grader is, as figures with 95% intervals.

The intervals are percentile bootstraps over whole assignments, because the criteria of one assignment are not
independent of each other (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
"""

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

RESAMPLES = 2000
_SHARES = (0.0, 0.5, 1.0)
_THRESHOLDS = [step / 20 for step in range(23)]


@dataclass(frozen=True, slots=True)
class Judged:
    """One criterion of one submission: what it earned and what it should have. Points are shares of the most."""

    right: float
    given: float | None  # None: no answer that can be used
    keywords: float  # share of the criterion's keywords that the submission holds
    quote: bool | None = None  # whether the evidence stands in the submission; None: none given


@dataclass(frozen=True, slots=True)
class Assessed:
    """What came of one assignment."""

    judged: Sequence[Judged] = ()
    totals: Sequence[tuple[float, float]] = ()  # (label, grade) of each graded submission
    gains: Sequence[float] = ()  # points with a message to the grader less those without, as shares of the most
    empties: Sequence[float] = ()  # points of empty submissions, likewise


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, its 95% interval, and of how many things it was taken. NaN: of none."""

    value: float
    low: float
    high: float
    count: int


def figures(assessed: Sequence[Assessed], seed: int, resamples: int = RESAMPLES) -> dict[str, Estimate]:
    """All figures by name."""
    return {name: _figure(score, assessed, seed, resamples) for name, score in _SCORES.items()}


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b, which allows for ties (Kendall 1945); NaN if one side is all ties."""
    concordant = 0
    untied = [0, 0]
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        first, second = _sign(a - c), _sign(b - d)
        concordant += first * second
        untied[0] += first != 0
        untied[1] += second != 0
    return concordant / math.sqrt(untied[0] * untied[1]) if all(untied) else math.nan


def baseline(assessed: Sequence[Assessed]) -> float:
    """The better of the best constant answer and the best two thresholds on the share of keywords found.

    Both are chosen on the very data that they are scored on: no grader of this kind does better.
    """
    judged = list(_judged(assessed))
    constant = max(_mean(item.right == share for item in judged) for share in _SHARES)
    return max(constant, _best_thresholds(judged))


def keyword_share(asked: str, text: str) -> float:
    """The share of the words and numbers of `asked` that occur in `text`."""
    wanted = _keywords(asked)
    return len(wanted & _keywords(text)) / len(wanted) if wanted else 0.0


def _best_thresholds(judged: Sequence[Judged]) -> float:
    """Full points from the upper threshold on, half from the lower."""
    # How many criteria with each label have at least this share of keywords.
    above = [
        {share: sum(i.right == share and i.keywords >= at for i in judged) for share in _SHARES} for at in _THRESHOLDS
    ]
    right = [
        above[high][1.0] + above[low][0.5] - above[high][0.5] + above[0][0.0] - above[low][0.0]
        for low, high in itertools.combinations_with_replacement(range(len(_THRESHOLDS)), 2)
    ]
    return max(right) / len(judged) if judged else math.nan


def _keywords(text: str) -> set[str]:
    return {word.casefold() for word in re.findall(r"\w+(?:\.\d+)?", text) if len(word) > 1}


def _judged(assessed: Iterable[Assessed]) -> Iterable[Judged]:
    return (item for one in assessed for item in one.judged)


def _mean(numbers: Iterable[float | bool]) -> float:
    taken = list(numbers)
    return sum(taken) / len(taken) if taken else math.nan


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def _figure(score: "_Score", assessed: Sequence[Assessed], seed: int, resamples: int) -> Estimate:
    """The score of all, and the middle 95% of its values for assignments drawn with replacement."""
    draw = random.Random(seed)
    drawn = (score.of(draw.choices(assessed, k=len(assessed))) for _ in range(resamples // score.cost))
    values = sorted(value for value in drawn if not math.isnan(value)) or [math.nan]
    low, high = values[int(0.025 * len(values))], values[int(0.975 * len(values))]
    return Estimate(score.of(assessed), low, high, sum(map(score.count, assessed)))


@dataclass(frozen=True, slots=True)
class _Score:
    of: Callable[[Sequence[Assessed]], float]
    count: Callable[[Assessed], int]
    cost: int = 1  # one resample's, in simple means


_SCORES = {
    "criteria_accuracy": _Score(
        lambda some: _mean(item.given == item.right for item in _judged(some)), lambda one: len(one.judged)
    ),
    "baseline_accuracy": _Score(baseline, lambda one: len(one.judged), cost=10),
    "quotes_found": _Score(
        lambda some: _mean(item.quote for item in _judged(some) if item.quote is not None),
        lambda one: sum(item.quote is not None for item in one.judged),
    ),
    "empty_score": _Score(
        lambda some: _mean(points for one in some for points in one.empties), lambda one: len(one.empties)
    ),
    "injection_gain": _Score(
        lambda some: _mean(gain for one in some for gain in one.gains), lambda one: len(one.gains)
    ),
    "rank_tau": _Score(
        lambda some: _mean(tau for one in some if not math.isnan(tau := kendall_tau(one.totals))),
        lambda one: len(one.totals),
    ),
}


def as_json(found: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    """Figures for JSON, which knows no NaN."""
    return {
        name: {key: _finite(getattr(figure, key)) for key in ("value", "low", "high", "count")}
        for name, figure in found.items()
    }


def _finite(number: float) -> float | None:
    return None if math.isnan(number) else round(number, 4)
