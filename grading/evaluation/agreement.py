"""How far two graders agree, with intervals, and a floor that any grader should be above.

    qwk          Cohen's kappa with quadratic weights (Cohen 1968), of points as shares of what there is to earn
    mae          mean absolute difference, points; `mae_share`: as a share of what there is to earn
    bias         mean of the first grader's points minus the second's: above 0 the first is lenient
    exact        share of equal points; `within_step`: of those at most one step apart

What is drawn again is a submission, with all of its criteria and raters: these are no independent grades. Everything is
a ratio of sums over submissions, so that thousands of bootstrap samples are sums of one array. SciPy and scikit-learn,
which the extra `evaluate` brings, are imported where they are needed.
"""

import importlib
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grading.rubric.rubric import Points, exact
from messages.errors import UsageError

MEASURES = ("qwk", "mae", "mae_share", "bias", "exact", "within_step")
CONFIDENCE = 0.95
MIN_UNITS = 10  # submissions; of fewer no interval is said
RESAMPLES = 1_999
_BATCH = 200  # bootstrap samples in memory at once
MIN_FLOOR_GRADES = 9  # per criterion: the floor's line is fitted on a third of them

_WORD = re.compile(r"\w\w")  # the least that the vectorizer counts
_Floats = NDArray[np.float64]


class EvaluationError(UsageError):
    """Nothing can be measured from this; the message says what to change."""


@dataclass(frozen=True, slots=True)
class GradePair:
    """Two graders' points for the same criterion of the same submission. `step`: of the points that may be given."""

    submission: str
    criterion: str  # "": the total
    first: Points
    second: Points
    max_points: Points
    step: Points = 1
    min_points: Points = 0  # below 0 where points can be lost

    @property
    def difference(self) -> float:
        """First minus second, points."""
        return float(exact(self.first) - exact(self.second))

    @property
    def shares(self) -> tuple[float, float]:
        """Both graders' points as shares of what there is to earn."""
        low, high = float(self.min_points), float(self.max_points)
        return (float(self.first) - low) / (high - low), (float(self.second) - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measure, None where it has none, and its interval (BCa bootstrap), None where nothing is known of it."""

    value: float | None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two graders over some of the criteria. `measures` has all of MEASURES."""

    name: str
    submissions: int
    pairs: int
    measures: Mapping[str, Estimate]


def extra(module: str) -> Any:
    """A module of the extra's packages. Raises EvaluationError where they are not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise EvaluationError(
            "kvasir evaluate needs SciPy and scikit-learn: pip install 'kvasir-inference[evaluate]'"
        ) from None


def agreement(name: str, pairs: Sequence[GradePair], before: Sequence[GradePair] = (), seed: int = 0) -> Agreement:
    """What these pairs say; the same seed gives the same intervals.

    With `before`, another grader's pairs with the same people: how much these are above, over what both graded.
    """
    units = {pair.submission for pair in pairs} & {pair.submission for pair in (before or pairs)}
    sides = [[pair for pair in side if pair.submission in units] for side in (before, pairs) if side]
    return Agreement(
        name,
        len(units),
        len(sides[-1]) if sides else 0,
        estimates([sums_of(side) for side in sides], seed),
    )


def sums_of(pairs: Sequence[GradePair]) -> _Floats:
    """A row for each of the sums that measures are made of, a column for each submission, by name."""
    places = {unit: place for place, unit in enumerate(sorted({pair.submission for pair in pairs}))}
    sums = np.zeros((10, len(places)))
    for pair in pairs:
        (first, second), distance = pair.shares, abs(pair.difference)
        sums[:, places[pair.submission]] += (
            *(1, first, second, first**2 + second**2, (first - second) ** 2),
            *(distance, abs(first - second), pair.difference, not distance, distance <= pair.step),
        )
    return sums


def _measures(sums: _Floats) -> _Floats:
    """MEASURES of sums over some submissions, along the first axis; nan where there is none.

    Kappa is 1 − the mean square between the two, over what it would be if neither knew of the other.
    """
    count, first, second, squares, between, *others = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        by_chance = squares - 2 * first * second / count
        kappa = 1 - np.where(by_chance > 1e-12 * count, between / by_chance, math.nan)
        return np.stack([kappa, *(other / count for other in others)])


def estimates(sums: Sequence[_Floats], seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Estimate]:
    """MEASURES with intervals, of the sums of one comparison; of two the second's minus the first's."""
    unit_count = sums[0].shape[1] if sums else 0
    if not unit_count:
        return dict.fromkeys(MEASURES, Estimate(None))

    def statistic(drawn: NDArray[np.int_], axis: int = -1) -> _Floats:
        ends = [_measures(each[:, drawn].sum(axis)) for each in sums]
        return ends[0] if len(ends) == 1 else ends[1] - ends[0]

    values, bounds = statistic(np.arange(unit_count)), np.full((2, len(MEASURES)), math.nan)
    if unit_count >= MIN_UNITS and resamples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where nothing varies there is no interval, and that is said so
            bounds = np.stack(
                extra("scipy.stats")
                .bootstrap(
                    (np.arange(unit_count),),
                    statistic,
                    vectorized=True,
                    n_resamples=resamples,
                    batch=_BATCH,
                    confidence_level=CONFIDENCE,
                    rng=np.random.default_rng(seed),
                )
                .confidence_interval
            )
    return {
        name: Estimate(
            None if math.isnan(value) else float(value),
            (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None,
        )
        for name, value, low, high in zip(MEASURES, values, *bounds, strict=True)
    }


def tfidf_floor(
    reference: str, answers: Sequence[str], shares: Sequence[float], draw: np.random.Generator
) -> list[tuple[int, float]]:
    """What counting words reaches: a line from an answer's likeness to the reference to its share of the points.

    A third of the answers is drawn, and the line fitted on their cosines of tf-idf vectors (sublinear tf, vocabulary
    and weights of these texts). For each answer of the rest: its place, and the share from 0 to 1. None where there
    are fewer than MIN_FLOOR_GRADES answers, or the reference has no word.
    """
    if len(answers) < MIN_FLOOR_GRADES or not _WORD.search(reference):
        return []
    vectorizer = extra("sklearn.feature_extraction.text").TfidfVectorizer(sublinear_tf=True)
    vectors = vectorizer.fit_transform([reference, *answers])
    likeness = (vectors[1:] @ vectors[0].T).toarray()
    fitted, held_out = np.split(draw.permutation(len(answers)), [len(answers) // 3])
    line = extra("sklearn.linear_model").LinearRegression().fit(likeness[fitted], np.asarray(shares)[fitted])
    held_out_shares = np.clip(line.predict(likeness[held_out]), 0, 1)
    return list(zip(held_out.tolist(), held_out_shares.tolist(), strict=True))
